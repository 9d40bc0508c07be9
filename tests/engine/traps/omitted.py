"""Traps: arguments that the example leaves out, and containers that it leaves empty, beside what is computed.

No branch waits for them: they go through a display, a loop, a function, or an argument of an op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.flow.coverage import CoverageTracer
from engine.flow.forward_arguments import ForwardArguments
from engine.unrecorded import inline_choices, unreached
from engine.unrecorded.omitted_options import _Uses
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.entering import trap_on_rows as _trap
from tests.engine.traps.other_rounds import Levels
from tests.engine.traps.trap import Ablation

__all__ = ["ABLATIONS", "TRAPS"]


# ---------------------------------------------------------------- beside other values


class _Loop(Net):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.features(x)
        y = h * 2
        for term in (h, shift):
            if term is not None:
                y = y + term
        return self.leave(y)  # type: ignore[no-any-return]


class _Sum(Net):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.leave(sum(t for t in (self.features(x), shift) if t is not None))  # type: ignore[no-any-return]


class _Filter(Net):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.leave(sum(filter(lambda t: t is not None, [self.features(x), shift])))  # type: ignore[no-any-return]


def _total(*terms: Tensor | None) -> Any:
    return sum(t for t in terms if t is not None)


class _Helper(Net):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.leave(_total(self.features(x), shift))  # type: ignore[no-any-return]


def _is_there(term: Tensor | None) -> bool:
    return term is not None


class _CalledBefore(Net):
    def total(self, one: Tensor, other: Tensor | None) -> Any:
        """Add what there is."""
        return sum(filter(_is_there, (one, other)))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.features(x)
        return self.leave(self.total(self.total(h, h), shift))  # type: ignore[no-any-return]


class _Partial(Net):
    def shifted(self, h: Tensor, shift: Any = 0.0) -> Tensor:
        """Add something."""
        return h + shift

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        shifted = self.shifted if shift is None else functools.partial(self.shifted, shift=shift)
        return self.leave(shifted(self.features(x)))  # type: ignore[no-any-return]


class _Callback(Net):
    def forward(self, x: Tensor, hook: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return self.leave((hook or nn.Identity())(self.features(x)))  # type: ignore[no-any-return]


class _Appended(Net):
    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        h = self.features(x)
        for function in [torch.tanh] + ([lambda t: t + scale] if scale is not None else []):
            h = function(h)
        return self.leave(h)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- argument of an op


class _Bias(Net):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.leave(F.linear(x, self.enter.weight, bias).relu())  # type: ignore[no-any-return]


class _Biases(Net):
    def forward(self, x: Tensor, biases: Any = (None,)) -> Tensor:
        for layer, bias in zip([self.enter], biases, strict=True):
            x = F.linear(x, layer.weight, bias).relu()
        return self.leave(x)  # type: ignore[no-any-return]


class _OwnBias(Net):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.leave(  # type: ignore[no-any-return]
            F.linear(x, self.enter.weight, self.enter.bias if bias is None else bias).sigmoid()
        )


class _FilledIn(Net):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            bias = self.enter.bias
        return self.leave(F.linear(x, self.enter.weight, bias).sigmoid())  # type: ignore[no-any-return]


class _Functional(Net):
    def forward(self, x: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        params = params or dict(self.named_parameters())
        h = F.linear(x, params["enter.weight"], params["enter.bias"]).relu()
        return F.linear(h, params["leave.weight"], params["leave.bias"])


class _Looked(Net):
    def forward(self, x: Tensor, params: Any = None) -> Tensor:
        params = params or {}
        return self.leave(F.linear(x, self.enter.weight, params.get("bias", self.enter.bias)).relu())  # type: ignore[no-any-return]


# ---------------------------------------------------------------- containers


class _EmptyList(Net):
    def forward(self, x: Tensor, terms: list[Tensor] | None = None) -> Tensor:
        if terms is None:
            terms = []
        return self.leave(sum([self.features(x), *terms]))  # type: ignore[no-any-return]


class _Extended(Net):
    def forward(self, x: Tensor, terms: list[Tensor] | None = None) -> Tensor:
        own = [self.features(x)]
        own.extend(terms or [])
        return self.leave(torch.stack(own).sum(0))  # type: ignore[no-any-return]


class _Keywords(Net):
    def forward(self, x: Tensor, **terms: Tensor) -> Tensor:
        return self.leave(sum(terms.values(), self.features(x)))  # type: ignore[no-any-return]


class _Prompts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Tensor] = []

    def add(self, prompt: Tensor) -> None:
        """Add a prompt."""
        self.prompts.append(prompt)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(functools.reduce(torch.add, self.prompts, self.features(x)))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what picks


class _Selecting(Levels):
    def levels(self, x: Tensor) -> list[Tensor]:
        """Return what each layer computes."""
        levels = []
        for layer in self.layers:
            x = layer(x)
            levels.append(x)
        return levels

    def select(self, levels: list[Tensor], tap: int = 2) -> Tensor:
        """Return one of them."""
        return levels[tap]


class _Passed(_Selecting):
    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.head(self.select(self.levels(x), **options))


class _Merged(_Selecting):
    def forward(self, x: Tensor, options: Any = {}) -> Any:  # noqa: B006
        own = {"tap": 2} | options
        return self.head(self.levels(x)[own["tap"]])


class _Default(_Selecting):
    def forward(self, x: Tensor, tap: int | None = None) -> Any:
        if tap is None:
            tap = 3
        return self.head(self.levels(x)[tap])


class _Order(Levels):
    def forward(self, x: Tensor, order: Any = None) -> Any:
        x = self.layers[0](x)
        for i in order or range(1, 4):
            x = self.layers[i](x)
        return self.head(x)


class _Chosen(Levels):
    def forward(self, x: Tensor, names: Any = None) -> Any:
        for layer in self.layers if names is None else [self.layers[int(name)] for name in names]:
            x = layer(x)
        return self.head(x)


class _KeptOrder(Levels):
    def set_up(self) -> None:
        self.order: Any = None

    def choose(self, order: Any) -> None:
        """Run the layers in another order from now on."""
        self.order = order

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        for i in self.order or range(1, 4):
            x = self.layers[i](x)
        return self.head(x)


class _Named(Net):
    def forward(self, x: Tensor, keys: Any = ()) -> Any:
        h = self.features(x)
        table = {"h": h, "y": self.leave(h)}
        return sum((table[key].square().mean(1) for key in keys), table["y"].square().mean(1))


class _Settings(_Selecting):
    def set_up(self) -> None:
        self.options: dict[str, Any] = {}

    def choose(self, **options: Any) -> None:
        """Select otherwise from now on."""
        self.options.update(options)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.select(self.levels(x), **self.options))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def _with_prompt(model: nn.Module) -> Any:
    model.add(_normal(3, 1))  # type: ignore[operator]
    return called(noise(3))(model)


def _choosing(model: nn.Module) -> Any:
    model.choose(tap=1)  # type: ignore[operator]
    return called(noise(3))(model)


def _in_order(model: nn.Module) -> Any:
    model.choose((3, 1))  # type: ignore[operator]
    return called(noise(3))(model)


SHIFT = _normal(3, 1)
SHIFTED = called(noise(3), shift=SHIFT)
TAPS = [called(noise(3), tap=tap) for tap in (1, 2, 3)]

PARAMETERS = {
    "enter.weight": _normal(8, 4), "enter.bias": _normal(8), "leave.weight": _normal(3, 8), "leave.bias": _normal(3),
}  # fmt: skip

TRAPS = [
    _trap("an argument among the terms of a loop", "for t in (pos, cond): if t is not None", _Loop, SHIFTED),
    _trap("an argument among the terms of a sum", "sum(t for t in (h, cond) if t is not None)", _Sum, SHIFTED),
    _trap("an argument that a filter leaves out", "filter(exists, (h, cond))", _Filter, SHIFTED),
    _trap("an argument among those of a helper", "def add(*terms)", _Helper, SHIFTED),
    _trap("an argument of a helper that gets two tensors before", "self.add(self.add(a, b), cond)", _CalledBefore,
          SHIFTED),
    _trap("an argument of a partial function", "functools.partial(f, cond=cond)", _Partial, SHIFTED),
    _trap("a function that the caller may pass", "(fn or identity)(h)", _Callback,
          called(noise(3), hook=lambda t: t + 1.0)),
    _trap("one function more in a list", "[f] + ([g] if k is not None else [])", _Appended,
          called(noise(3), scale=0.5)),
    _trap("a bias that the caller may pass", "MAML: F.linear(x, weight, bias)", _Bias,
          called(noise(3), bias=_normal(8))),
    _trap("biases in a list that the caller may pass", "functional layers", _Biases,
          called(noise(3), biases=[_normal(8)])),
    _trap("a bias in the place of the layer's own", "self.bias if bias is None else bias", _OwnBias,
          called(noise(3), bias=_normal(8))),
    _trap("a bias that is filled in", "if bias is None: bias = self.bias", _FilledIn,
          called(noise(3), bias=_normal(8))),
    _trap("parameters in the place of all own ones", "MAML: params or dict(self.named_parameters())", _Functional,
          called(noise(3), params=PARAMETERS)),
    _trap("a bias that is looked up", "params.get('bias', self.bias)", _Looked,
          called(noise(3), params={"bias": _normal(8)})),
    _trap("a list that is empty by default", "if ts is None: ts = []", _EmptyList, called(noise(3), terms=[SHIFT])),
    _trap("a list that another one may extend", "xs.extend(ts or [])", _Extended,
          called(noise(3), terms=[_normal(3, 8)])),
    _trap("tensors in keyword arguments", "sum(kwargs.values(), h)", _Keywords, called(noise(3), a=SHIFT)),
    _trap("prompts that a method adds", "deep prompts: [h, *self.prompts]", _Prompts, _with_prompt),
    _trap("a level in keyword arguments", "self.select(levels, **kwargs)", _Passed, *TAPS),
    _trap("a level in a dictionary of options", "defaults | options", _Merged, called(noise(3), options={"tap": 1})),
    _trap("a level that is the last one by default", "if tap is None: tap = 3", _Default, *TAPS),
    _trap("an order that the caller may pass", "for i in order or range(n)", _Order, called(noise(3), order=(3, 2, 1))),
    _trap("layers that the caller may name", "[self.layers[int(n)] for n in names]", _Chosen,
          called(noise(3), names=("0", "3"))),
    _trap("an order that a method may set", "for i in self.order or range(n)", _KeptOrder, _in_order),
    _trap("results that the caller may name", "sum(table[key] for key in keys)", _Named, called(noise(3), keys=("h",))),
    _trap("a level in options that a method sets", "self.select(levels, **self.options)", _Settings, _choosing),
]  # fmt: skip


def _no_parameters_instead(patch: pytest.MonkeyPatch) -> None:
    for module in (inline_choices, unreached):
        patch.setattr(module, "parameters_instead", lambda branch, runs: iter(()))


ABLATIONS = [
    Ablation(
        "what an omitted argument may join is used",
        lambda patch: patch.setattr(unreached, "use_values_beside_omitted_options", lambda *arguments: None),
        "an argument among the terms of a loop",
    ),
    Ablation(
        "an argument that another call of a helper leaves out is not filled",
        lambda patch: patch.setattr(CoverageTracer, "_narrow_filled", lambda self, frame: None),
        "an argument of a helper that gets two tensors before",
    ),
    Ablation(
        "an op may get the tensor that the example leaves out",
        lambda patch: patch.setattr(_Uses, "ops_without", lambda self: iter(())),
        "a bias that the caller may pass",
    ),
    Ablation(
        "parameters that stand in for an argument are used",
        lambda patch: patch.setattr("engine.unrecorded.unreached.assume_fallbacks_vary", lambda *arguments: None),
        "a bias that is filled in",
    ),
    Ablation(
        "parameters on the other side of an expression vary",
        _no_parameters_instead,
        "a bias in the place of the layer's own",
    ),
    Ablation(
        "omitted arguments are followed",
        lambda patch: patch.setattr(ForwardArguments, "omitted_in", lambda self, code: ()),
        "a level in keyword arguments",
    ),
    Ablation(
        "a container in an attribute may be filled",
        lambda patch: patch.setattr("engine.unrecorded.omitted_options._containers_filled_later", lambda *a: set()),
        "prompts that a method adds",
    ),
]
