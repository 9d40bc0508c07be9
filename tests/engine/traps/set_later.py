"""Traps: numbers that follow from attributes which code sets later, far from their present value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.numbers import certainty, literals
from engine.unrecorded import unreached
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Three layers, a counter, a flag and a table that methods set."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.t, self.on = 0, False
        self.table = [0] * 10 + [1] * 10 + [2] * 10
        self.gates = nn.Parameter(torch.tril(torch.ones(5, 16), 3))

    def set_t(self, t: int) -> None:
        self.t = t

    def switch(self, on: bool) -> None:
        self.on = on

    def features(self, x: Tensor) -> list[Tensor]:
        h = self.stem(x).tanh()
        b = self.b(h).tanh()
        return [h, b, self.a(b).tanh()]


def _padded(h: Tensor) -> Tensor:
    return F.pad(h, (0, 16 - h.shape[1]))


class _Added(_Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)[0] + self.t // 10)


class _Opened(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)[0]
        mask = torch.zeros_like(h)
        mask[:, : self.t // 2] = 1
        return self.head(h * mask)


class _Widened(_Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(_padded(self.features(x)[0][:, : 4 + self.t // 2]))


class _Row(_Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)[0] * self.gates[self.t])


class _Counting(_Net):
    def forward(self, x: Tensor) -> Any:
        self.t += 1
        return self.head(self.features(x)[0] + self.t // 5)


class _FlagAndSize(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.stem(x).tanh(); b = self.b(h).tanh()  # fmt: skip  # noqa: E702 -- both on one line
        if self.on and len(x) > 3:
            h = b
        return self.head(h)


class _EveryFourth(_Net):
    def forward(self, x: Tensor) -> Any:
        h, b, _ = self.features(x)
        if self.t > 0 and self.t % 4 == 0:
            h = b
        return self.head(h)


def _pick(items: list[Tensor], i: int) -> Tensor:
    return items[i]


class _Picked(_Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(_pick(self.features(x), self.t // 10))


class _ByTable(_Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)[self.table[self.t]])


class _Several(_Net):
    def forward(self, x: Tensor) -> Any:
        items = self.features(x)
        return self.head(sum(items[i] for i in range(1 + self.t // 10)))


class _InPlace(_Net):
    def forward(self, x: Tensor) -> Any:
        i = self.t
        i //= 10
        return self.head(self.features(x)[i])


def _trimmed(h: Tensor, n: int = 4) -> Tensor:
    return F.pad(h[:, :n], (0, 0, 0, 0, 0, 16 - h[:, :n].shape[1]))


class _TwoCallers(nn.Module):
    """A function of which one caller passes a literal, and another an argument of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, n: int = 4) -> Any:
        h = self.mid(self.stem(x).tanh()).tanh()
        h = _trimmed(h, n) if len(x) > 3 else _trimmed(h, 4)
        return self.head(h)


class _InnerDefault(nn.Module):
    """The default of an inner function holds an argument of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, n: int = 4) -> Any:
        h = self.mid(self.stem(x).tanh()).tanh()

        def cut(h: Tensor, k: int = n) -> Tensor:
            return h[:, :k]

        h = cut(h)
        return self.head(F.pad(h, (0, 0, 0, 0, 0, 16 - h.shape[1])))


class _Configured(nn.Module):
    """A width that methods of subclasses set in other ways than by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.width = nn.Linear(6, 16), nn.Linear(16, 5), 4

    def forward(self, x: Tensor) -> Any:
        return self.head(_padded(self.stem(x).tanh()[:, : self.width]))


class _ByKeys(_Configured):
    def configure(self, **options: Any) -> None:
        for key, value in options.items():
            setattr(self, key, value)


class _ByTableOfSelf(_Configured):
    def configure(self, **options: Any) -> None:
        self.__dict__.update(options)


class _ByVars(_Configured):
    def configure(self, **options: Any) -> None:
        vars(self)["width"] = options["width"]


class _ByObject(_Configured):
    def configure(self, **options: Any) -> None:
        object.__setattr__(self, "width", options["width"])


def _at(**attributes: Any) -> Use:
    """Return a use that sets attributes first."""

    def use(model: nn.Module) -> Any:
        for name, value in attributes.items():
            setattr(model, name, value)
        return once(4, 6)(model)

    return use


def _with(n: int, *shape: int) -> Use:
    """Return a use that passes an argument."""

    def use(model: nn.Module) -> Any:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(noise, n)

    return use


def _configured(model: Any) -> Any:
    model.configure(width=12)
    return once(4, 6)(model)


def _often(model: nn.Module) -> Any:
    return [once(4, 6)(model) for _ in range(12)]


def _example(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: torch.zeros(shape, dtype=torch.float64)


TRAPS = [
    *(
        Trap(
            name=name,
            source=source,
            make=kind,
            example=_example(2, 6),
            uses=[once(3, 6), use],
            seeds=(0, 1, 2),
        )
        for name, source, kind, use in (
            ("a tenth of a counter is added", "curricula: stage = step // k", _Added, _at(t=20)),
            ("half of a counter opens a mask", "gradual unfreezing and growing masks", _Opened, _at(t=24)),
            ("a width that a counter opens", "progressive width: base + step // k", _Widened, _at(t=16)),
            ("a row of a table by an attribute", "gates by task or stage (PackNet, HAT)", _Row, _at(t=4)),
            ("a counter that forward counts", "warm-up inside of a layer", _Counting, _often),
            ("a flag and a size, on one line", "features that a large batch alone mixes", _FlagAndSize, _at(on=True)),
            ("every fourth step", "lazy regularisation every k steps (StyleGAN2)", _EveryFourth, _at(t=12)),
            ("an index that a function is passed", "helpers that pick a level of a pyramid", _Picked, _at(t=12)),
            ("an index by a table", "a table of stages by epoch", _ByTable, _at(t=12)),
            ("as many items as a counter says", "deep supervision by stages", _Several, _at(t=22)),
            ("an index that is divided in place", "stage = epoch; stage //= k", _InPlace, _at(t=12)),
            ("attributes by keys", "configure(**options)", _ByKeys, _configured),
            ("attributes by the table of self", "self.__dict__.update(options)", _ByTableOfSelf, _configured),
            ("an attribute by vars", "vars(self)[key] = value", _ByVars, _configured),
            ("an attribute by object", "object.__setattr__ past nn.Module's own", _ByObject, _configured),
        )
    ),
    Trap(
        name="a number that two callers pass",
        source="helpers with a default that one caller overrides",
        make=_TwoCallers,
        example=_example(2, 3, 8, 8),
        uses=[_with(12, 4, 3, 8, 8), _with(16, 5, 3, 8, 8)],
        seeds=(0, 1, 2, 3),
    ),
    Trap(
        name="a default that holds an argument",
        source="docs.python.org, FAQ: def f(x, n=n) in a function",
        make=_InnerDefault,
        example=_example(2, 3, 8, 8),
        uses=[_with(12, 2, 3, 8, 8), _with(9, 2, 3, 8, 8)],
        seeds=(0, 1, 2, 3),
    ),
]


def _without_certainty(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(certainty.Certainty, "note", lambda self, place, is_fixed: None)


def _without_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "doubt_numbers_set_later", lambda runs, assumptions: None)
    _without_certainty(patch)  # the recording at the next number tells as well that it is not fixed


def _with_any_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(literals, "has_fixed_default", lambda name, frame: True)


ABLATIONS = [
    Ablation("numbers of attributes that code sets later", _without_doubt, "a tenth of a counter is added"),
    Ablation("numbers that one caller alone fixes", _without_certainty, "a number that two callers pass"),
    Ablation("defaults that a running function evaluates", _with_any_default, "a default that holds an argument"),
]
