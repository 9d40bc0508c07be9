"""Traps: items that code comes to step by step, without a branch and without an index."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives import arguments, attributes, outer_values, steps
from engine.alternatives.other_sizes import OtherSizes
from engine.flow import forward_arguments
from engine.numbers.replaced_functions import PASSED_THROUGH
from engine.recording import variants
from engine.running import provenance
from engine.unrecorded import picked_items
from tests.engine.traps.entering import called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Levels(nn.Module):
    """Four levels of features, one line for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, 6) for i in (4, 6, 6, 6))
        self.head, self.last = nn.Linear(6, 3), 1

    def end_at(self, last: int) -> None:
        """Set the number of the last level."""
        self.last = last

    def levels(self, x: Tensor) -> list[Tensor]:
        """Return all of them."""
        return [x := layer(x).relu() for layer in self.layers]


class _Iterator(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        items = iter(self.levels(x))
        for _ in range(steps):
            y = next(items)
        return self.head(y)


class _Generator(_Levels):
    def each(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the levels."""
        for layer in self.layers:
            yield (x := layer(x).relu())

    def forward(self, x: Tensor, steps: int = 2) -> Any:
        items = self.each(x)
        for _ in range(steps):
            y = next(items)
        return self.head(y)


class _Latest(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        return self.head(sum(deque(self.levels(x), maxlen=steps)))


class _Dropped(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        levels = self.levels(x)
        for _ in range(steps - 1):
            levels.pop()
        return self.head(levels[-1])


class _Chain(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        node: Any = None
        for y in self.levels(x):
            node = (y, node)
        for _ in range(steps - 1):
            node = node[1]
        return self.head(node[0])


class _Cursor(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        place = SimpleNamespace(levels=self.levels(x), at=-1)
        for _ in range(steps):
            place.at += 1
        return self.head(place.levels[place.at])


class _Layers(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        layers = iter(self.layers)
        for _ in range(steps):
            x = next(layers)(x).relu()
        return self.head(x)


class _Defaults(_Levels):
    def forward(self, x: Tensor, steps: int = 2) -> Any:
        levels = self.levels(x)
        return self.head(dict(enumerate(levels, 1)).setdefault(steps, levels[0]))


class _Set(_Levels):
    def forward(self, x: Tensor) -> Any:
        left, levels = self.last, [z for y in self.levels(x) for z in (y, y.tanh())]
        while left > 0:
            y = levels.pop()
            left -= 1
        return self.head(y)


LAST = 1
"""The number of the last level."""


def end_at(last: int) -> None:
    """Set it."""
    global LAST
    LAST = last


class _Global(_Levels):
    def forward(self, x: Tensor) -> Any:
        levels = self.levels(x)
        for _ in range(LAST):
            y = levels.pop()
        return self.head(y)


class _Sized(_Levels):
    def forward(self, x: Tensor) -> Any:
        items = iter(self.levels(x))
        for _ in range(len(x) // 2):
            y = next(items)
        return self.head(y)


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, 6) for i in (4, 6, 6, 6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        h, levels, steps = x, [], x.transpose(0, 1)
        for layer in self.layers:
            h = layer(h).relu()
            levels.append(h)
        items = iter(levels)
        y = next(items)
        for _ in range(steps.shape[0] // 4):
            y = next(items)
        return self.head(y)


class _Exceeded(_Levels):
    def forward(self, x: Tensor) -> Any:
        levels, last = self.levels(x), 0
        while x.shape[0] > 3 * last and last < 3:
            last += 1
            y = levels[last]
        return self.head(y)


class _Asked(_Levels):
    def forward(self, x: Tensor, steps: Tensor) -> Any:
        items = iter(self.levels(x))
        for _ in range(steps):  # type: ignore[call-overload]
            y = next(items)
        return self.head(y)


# ---------------------------------------------------------------- by name


class _Fields(NamedTuple):
    low: Tensor
    middle: Tensor
    high: Tensor
    top: Tensor


class _Named(_Levels):
    def forward(self, x: Tensor, level: str = "middle") -> Any:
        return self.head(getattr(_Fields(*self.levels(x)), level))


class _Namespace(_Levels):
    def forward(self, x: Tensor, level: str = "p1") -> Any:
        levels = SimpleNamespace(**{f"p{k}": y for k, y in enumerate(self.levels(x))})
        return self.head(levels.__dict__[level])


class _OnItself(_Levels):
    def forward(self, x: Tensor, level: str = "p1") -> Any:
        for k, y in enumerate(self.levels(x)):
            setattr(self, f"p{k}", y)
        y = getattr(self, level)
        for k in range(4):
            delattr(self, f"p{k}")
        return self.head(y)


# ---------------------------------------------------------------- a call of the module's own


class _Flipping(_Levels):
    def __call__(self, x: Tensor, *rest: Any, flip: bool = False, **more: Any) -> Any:
        if flip:
            return self.head(self.layers[0](x).relu().flip(1))
        return super().__call__(x, *rest, **more)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.levels(x)[-1])


class _Adding(_Flipping):
    def __call__(self, x: Tensor, extra: Any = None) -> Any:  # type: ignore[override]
        return super().__call__(x) if extra is None else self.head(self.layers[0](x).relu() + extra)


class _Ending(_Levels):
    def __call__(self, x: Tensor, flip: str = "no") -> Any:
        return super().__call__(x, flip == "yes", None)

    def forward(self, x: Tensor, flip: bool, extra: Any) -> Any:
        y = self.levels(x)[-1]
        y = y if extra is None else y + extra
        return self.head(y.flip(1) if flip else y)


def _ended(*numbers: int) -> Use:
    def use(model: Any) -> Any:
        results = []
        for last in numbers:
            model.end_at(last)
            results.append(called(noise(3))(model))
        return results

    return use


def _trap(name: str, source: str, make: Callable[[], nn.Module], uses: Sequence[Use] = ()) -> Trap:
    return Trap(name, source, make, lambda model: noise(2), [called(noise(3)), *uses])


def _ended_globally(model: nn.Module) -> Any:
    results = []
    for last in (2, 3, 4, 1):
        end_at(last)
        results.append(called(noise(3))(model))
    return results


def _series(length: int) -> Tensor:
    return noise(2 * length).reshape(2, length, 4)


_STEPS = [called(noise(3), steps=steps) for steps in (1, 2, 3, 4)]
_NAMES = [called(noise(3), level=name) for name in ("low", "high", "top")]
_KEYS = [called(noise(3), level=name) for name in ("p0", "p2", "p3")]
_ROWS = [called(noise(n)) for n in (3, 4, 6, 7, 8, 9)]

TRAPS = [
    _trap("the last of some items of an iterator", "for _ in range(steps): h = next(levels)", _Iterator, _STEPS),
    _trap("the last of some items of a generator", "for _ in range(steps): h = next(self.stages(x))", _Generator,
          _STEPS),
    _trap("a sum of the latest items", "deque(features, maxlen=n)", _Latest, _STEPS),
    _trap("what is left when items are dropped", "for _ in range(n): features.pop()", _Dropped, _STEPS),
    _trap("an item of a chain", "node = node[1]", _Chain, _STEPS),
    _trap("an item at a cursor", "self.position += 1", _Cursor, _STEPS),
    _trap("layers of an iterator", "x = next(layers)(x)", _Layers, _STEPS),
    _trap("an item with a default", "features.setdefault(level, features[0])", _Defaults, _STEPS),
    _trap("items up to a number that a method sets", "while left: h = features.pop()", _Set,
          [_ended(*ns) for ns in itertools.pairwise((1, 4, 7, 8))]),
    _trap("items up to a number of the file", "def set_depth(n): global DEPTH", _Global, [_ended_globally]),
    Trap("the last of some items, by a size", "for _ in range(n // stride): h = next(levels)", _Sized,
         lambda model: noise(4), _ROWS, refused="does not run where the masked one does"),
    Trap("the last of some items, by a length behind a transposition", "x.transpose(0, 1).shape[0] // n",
         _Transposed, lambda model: _series(5), [called(_series(n)) for n in (4, 8, 9, 13, 16)]),
    _trap("an item by thresholds of a size", "while n > 3 * k: h = features[k]", _Exceeded, _ROWS),
    Trap("as many items as a tensor says", "for _ in range(lengths.max())", _Asked,
         lambda model: (noise(2), torch.tensor(2)), [called(noise(3), torch.tensor(n)) for n in (1, 2, 3, 4)]),
    _trap("a field of a named tuple by name", "getattr(output, self.out_feature)", _Named, _NAMES),
    _trap("an entry of a namespace by name", "vars(output)[name]", _Namespace, _KEYS),
    _trap("an attribute by name that a loop sets", "setattr(self, f'p{i}', h); getattr(self, name)", _OnItself, _KEYS),
    _trap("a flag of the module's own call", "def __call__(self, x, flip=False)", _Flipping,
          [called(noise(3), flip=True)]),
    _trap("an argument of the module's own call", "def __call__(self, x, extra=None)", _Adding,
          [called(noise(3), extra=noise(9).reshape(6, 6)[:3])]),
    _trap("an argument that the module's own call computes", "super().__call__(x, mode == 'eval')", _Ending,
          [called(noise(3), flip="yes")]),
]  # fmt: skip


def _lines_alone(patch: pytest.MonkeyPatch) -> None:
    for place in (steps, variants):
        patch.setattr(place, "layers_behind", lambda nodes: {v.index: frozenset() for n in nodes for v in n.outputs})


def _forward_alone(patch: pytest.MonkeyPatch) -> None:
    for place in (arguments, forward_arguments):
        patch.setattr(place, "own_calls", lambda module: [])


def _once(setting: Any, accepts: Callable[[Any], bool], leads_on: Callable[[], bool]) -> bool:
    return accepts(setting)


ABLATIONS = [
    Ablation("values of one line are told by the layers behind them", _lines_alone,
             "the last of some items of an iterator"),
    Ablation("numbers that lead to something new go on",
             lambda patch: patch.setattr(attributes, "record_in_steps", _once),
             "items up to a number that a method sets"),
    Ablation("numbers outside that lead to something new go on",
             lambda patch: patch.setattr(outer_values, "record_in_steps", _once),
             "items up to a number of the file"),
    Ablation("sizes that lead to something new go on",
             lambda patch: patch.setattr(OtherSizes, "_try_further", lambda self, axes, accepts: None),
             "the last of some items, by a size"),
    Ablation("an attribute by a computed name may be any other",
             lambda patch: patch.setattr(picked_items, "fields_by_name", lambda tree: iter(())),
             "a field of a named tuple by name"),
    Ablation("a call of the module's own has arguments, too", _forward_alone, "a flag of the module's own call"),
    Ablation("range asks on behalf of its caller",
             lambda patch: patch.setattr(provenance, "_BETWEEN", provenance._BETWEEN - {PASSED_THROUGH}),
             "as many items as a tensor says"),
]  # fmt: skip
