"""Traps: choices within an expression, of a value that no variable holds, of an item or of a layer."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.flow import conditions
from engine.recording import tape
from engine.unrecorded import picked_items, unreached
from engine.unrecorded.picked_items import _Sources
from tests.engine.traps.entering import called, noise
from tests.engine.traps.entering import trap_on_rows as _trap
from tests.engine.traps.other_rounds import Levels, marked
from tests.engine.traps.trap import Ablation, Trap

__all__ = ["ABLATIONS", "TRAPS"]


class _Two(nn.Module):
    """Two layers, of which either may feed the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layers compute."""
        h = self.first(x).sigmoid()
        return h, self.second(h).sigmoid()


class _Operand(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        return self.head((h if len(x) == 7 else g).cos())


class _Argument(_Two):
    def forward(self, x: Tensor, **options: Any) -> Any:
        h, g = self.both(x)
        return self.head(torch.cos(h if options.get("early") else g))


class _Computed(_Two):
    def forward(self, x: Tensor) -> Any:
        h = self.first(x).sigmoid()
        return self.head((h if len(x) == 7 else self.second(h).sigmoid()).cos())


class _Attribute(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        self.last = h if len(x) == 7 else g
        y = self.head(self.last.cos())
        del self.last
        return y


class _Length(_Two):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.both(x)[len(x) < 5].cos())


class _Table(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        return self.head({True: h}.get(len(x) == 7, g))


class _Inference(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        if torch.is_inference_mode_enabled():
            g = h
        return self.head(g)


class _Gradients(_Two):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.both(x)[torch.is_grad_enabled()])


class _Tracing(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        y = self.head(g)
        return (y, h) if torch.jit.is_tracing() else y


class _Exporting(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        if torch.compiler.is_exporting():
            g = h
        return self.head(g)


class _Compiling(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        return self.head(h if torch._dynamo.is_compiling() else g)  # type: ignore[no-untyped-call]


class _TypeText(_Two):
    def forward(self, x: Tensor) -> Any:
        h, g = self.both(x)
        z = h if x.type() == "torch.FloatTensor" else g
        return self.head(z)


class _Layers(Levels):
    def set_up(self) -> None:
        for layer in self.layers:
            layer.is_on = True  # type: ignore[assignment]

    def mark(self, k: int) -> None:
        self.layers[k].is_on = False  # type: ignore[assignment]


class _Listed(_Layers):
    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        for layer in [layer for layer in self.layers[1:] if layer.is_on]:
            x = layer(x)
        return self.head(x)


class _Property(_Layers):
    @property
    def active(self) -> list[nn.Module]:
        """Layers that are on."""
        return list(filter(lambda layer: layer.is_on, self.layers[1:]))

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        for layer in self.active:
            x = layer(x)
        return self.head(x)


class _Logarithm(Levels):
    def forward(self, x: Tensor) -> Any:
        rounds = math.ceil(math.log2(x.shape[1] + 1))
        for _, layer in zip(range(rounds), self.layers, strict=False):
            x = layer(x)
        return self.head(x)


class _Root(Levels):
    def forward(self, x: Tensor) -> Any:
        levels = [x := layer(x) for layer in self.layers]
        for _, selected in zip(range(1 + math.isqrt(x.shape[0]) // 3), levels, strict=False):
            x = selected
        return self.head(levels[-1]), x.square().mean(1)


def _with_gradients(model: nn.Module) -> Any:
    return copy.deepcopy(model).eval()(noise(3)).detach()


@dataclasses.dataclass
class _Options:
    """Settings of a network."""

    tap: int = 2


class _Replaced(Levels):
    def set_up(self) -> None:
        self.options: Any = _Options()

    def mark(self, k: int) -> None:
        self.options = dataclasses.replace(self.options, tap=k)

    def forward(self, x: Tensor) -> Any:
        levels = []
        for layer in self.layers:
            x = layer(x)
            levels.append(x)
        return self.head(levels[self.options.tap])


class _Updated(_Replaced):
    def set_up(self) -> None:
        self.options = SimpleNamespace(tap=2)

    def mark(self, k: int) -> None:
        vars(self.options).update(tap=k)


def _traced(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch would rather export, many still trace
        return torch.jit.trace(copy.deepcopy(model).eval(), noise(3))(noise(3))  # type: ignore[no-untyped-call]


def _exported(model: nn.Module) -> Any:
    return torch.export.export(copy.deepcopy(model).eval(), (noise(3),)).module()(noise(3))


def _in_single_precision(model: nn.Module) -> Any:
    with torch.no_grad():
        return copy.deepcopy(model).eval().float()(noise(3).float()).double()


def _without_two(model: nn.Module) -> Any:
    model.mark(2)  # type: ignore[operator]
    return called(noise(3))(model)


LARGER = [called(noise(n)) for n in (1, 7, 20, 40)]

TRAPS = [
    _trap("an operand by a size", "(h if len(x) == 7 else g).mean(1)", _Operand, *LARGER),
    _trap("an argument of a function by an option", "F.relu(h if early else g)", _Argument,
          called(noise(3), early=True)),
    _trap("an operand by a size, or a layer", "(h if short else self.layer(h)).mean(1)", _Computed, *LARGER),
    _trap("an attribute by a size", "self.z = h if len(x) == 7 else g", _Attribute, *LARGER),
    _trap("an item by a length", "(g, h)[len(x) > 4]", _Length, *LARGER),
    _trap("an item of a table by a length", "{True: h}.get(len(x) == 7, g)", _Table, *LARGER),
    _trap("another variable in inference mode", "if torch.is_inference_mode_enabled()", _Inference, _with_gradients),
    _trap("an item by the gradients' mode", "(g, h)[torch.is_grad_enabled()]", _Gradients, _with_gradients),
    _trap("a result that tracing alone returns", "detectors: if torch.jit.is_tracing()", _Tracing, _traced),
    _trap("another variable in an export", "if torch.compiler.is_exporting()", _Exporting, _exported),
    _trap("another value while compiling", "if torch._dynamo.is_compiling()", _Compiling, _exported),
    Trap("another value by the text of a type", "if x.type() == 'torch.cuda.HalfTensor'", _TypeText,
         lambda model: noise(2), [_in_single_precision], tolerance=1e-5),
    _trap("a list of layers that are on", "[l for l in self.layers if l.enabled]", _Listed, _without_two),
    _trap("a property that filters layers", "filter(lambda l: l.enabled, self.layers)", _Property, _without_two),
    _trap("a level in settings that a method replaces", "self.cfg = dataclasses.replace(self.cfg, tap=k)", _Replaced,
          marked),
    _trap("a level in settings that a method updates", "vars(self.cfg).update(tap=k)", _Updated, marked),
    Trap("rounds by a logarithm", "StyleGAN: range(int(math.log2(size)))", _Logarithm,
         lambda model: noise(18).unflatten(0, (2, 9)), [called(noise(n)[None]) for n in (1, 2, 17, 40)]),
    _trap("rounds by a root", "range(math.isqrt(n))", _Root, *LARGER, called(noise(100))),
]  # fmt: skip


ABLATIONS = [
    Ablation(
        "the other side of an expression is kept",
        lambda patch: patch.setattr(unreached, "values_instead", lambda *arguments: iter(())),
        "an operand by a size",
        repaired=True,
    ),
    Ablation(
        "tracing runs the same code",
        lambda patch: patch.setattr(conditions, "ALWAYS_FALSE", frozenset({"is_tracing", "is_exporting"})),
        "a result that tracing alone returns",
    ),
    Ablation(
        "the length of a tensor is a size",
        lambda patch: patch.setattr(_Sources, "_is_length", lambda self, expr: False),
        "an item by a length",
    ),
    Ablation(
        "an item in a loop may have attributes that code sets",
        lambda patch: patch.setattr(_Sources, "_is_of_item", lambda self, node: False),
        "a list of layers that are on",
    ),
    Ablation(
        "rounds of other steps than the sizes are not followed",
        lambda patch: patch.setattr(picked_items, "_rounds", lambda tree: iter(())),
        "rounds by a root",
    ),
    Ablation(
        "a run that reads other results does not repeat the first",
        lambda patch: patch.setattr(
            tape, "repeats", lambda one, other, shapes: [n.op for n in one] == [n.op for n in other]
        ),
        "an item by the gradients' mode",
    ),
]
