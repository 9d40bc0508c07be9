"""Traps: a condition that comes out both ways in one call, in rounds of a loop or calls of a helper.

Another argument, a setting, a buffer or a size lets it hold in other rounds, and selects another value there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives import attribute_choices
from engine.flow.branches import Branch
from engine.flow.coverage import FunctionCoverage
from engine.observations import surroundings
from engine.unrecorded import picked_items
from tests.engine.traps.entering import called, noise
from tests.engine.traps.trap import Ablation, Trap

__all__ = ["ABLATIONS", "TRAPS", "Levels", "marked"]


class Levels(nn.Module):
    """Four layers with activations of their own; a method sets which of them is marked."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4, 6, 6, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(i, 6), nn.Sigmoid()) for i in sizes)
        self.head = nn.Linear(6, 3)
        self.set_up()

    def set_up(self) -> None:
        """Create what marks a layer."""

    def mark(self, k: int) -> None:
        """Mark the layer of a number."""

    def outputs(self, x: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and what was selected in a form that says nothing of its channels."""
        return self.head(x), selected.square().mean(1)


# ---------------------------------------------------------------- by an argument


class _TensorArgument(Levels):
    def forward(self, x: Tensor, k: Tensor) -> Any:
        selected = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == k:
                selected = x
        return self.outputs(x, selected)


class _Threshold(Levels):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        selected = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if t >= 250 * i:
                selected = x
        return self.outputs(x, selected)


class _Helper(Levels):
    def later(self, new: Tensor, old: Tensor, t: int, start: int) -> Tensor:
        """Return the new features from a step on."""
        return new if t >= start else old

    def forward(self, x: Tensor, t: int = 500) -> Tensor:
        a = self.layers[0](x)
        b = self.layers[1](a)
        c = self.layers[2](b)
        a = self.later(b, a, t, 200)
        a = self.later(c, a, t, 400)
        return self.head(self.later(self.layers[3](c), a, t, 700))  # type: ignore[no-any-return]


class _NamedEnd(Levels):
    def forward(self, x: Tensor, name: str = "layer2") -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if name == f"layer{i}":
                return self.head(x)  # type: ignore[no-any-return]
        return x.mean(1)


class _Break(Levels):
    def forward(self, x: Tensor, resolution: int = 256) -> Tensor:
        for size, layer in zip((64, 128, 256, 512), self.layers, strict=True):
            x = layer(x)
            if size == resolution:
                break
        return self.head(x)  # type: ignore[no-any-return]


class _Flags(Levels):
    def forward(self, x: Tensor, keep: Sequence[bool] = (False, False, True, False)) -> Any:
        selected = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if keep[i]:
                selected = x
        return self.outputs(x, selected)


class _Letter(Levels):
    def forward(self, x: Tensor, tap: str = "c") -> Any:
        k, selected = "abcd".index(tap), x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == k:
                selected = x
        return self.outputs(x, selected)


class _Key(Levels):
    def forward(self, x: Tensor, name: str = "layer2") -> Any:
        features = {}
        for i, layer in enumerate(self.layers):
            x = features[f"layer{i}"] = layer(x)
        return self.outputs(x, features[name])


class _Residuals(Levels):
    def forward(self, x: Tensor, t: int = 5) -> Tensor:
        x = self.layers[0](x)
        for threshold, layer in zip((6, 3, 0), list(self.layers)[1:], strict=True):
            y = layer(x)
            x = y if t > threshold else x + y
        return self.head(x)  # type: ignore[no-any-return]


class _Strength(Levels):
    def forward(self, x: Tensor, strength: float = 0.7) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1 + int(3 * strength) :]:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Next(Levels):
    def forward(self, x: Tensor, t: int = 500) -> Tensor:
        levels = []
        for layer in self.layers:
            x = layer(x)
            levels.append(x)
        return self.head(next(f for f, end in zip(levels, (200, 400, 700, 9999), strict=True) if t < end))  # type: ignore[no-any-return]


class _Yielded(Levels):
    def features(self, x: Tensor, t: int) -> Iterator[Tensor]:
        """Yield the features from a step on."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if t < 250 * (i + 1):
                yield x

    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = list(self.features(x, t))
        return self.outputs(levels[-1], levels[0])


class _Attribute(Levels):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if t >= 250 * i:
                self.selected = x
        selected = self.selected
        del self.selected
        return self.outputs(x, selected)


class _Selecting(Levels):
    def levels(self, x: Tensor) -> list[Tensor]:
        """Return the features of all layers."""
        levels = []
        for layer in self.layers:
            x = layer(x)
            levels.append(x)
        return levels


class _Filtered(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = self.levels(x)
        return self.outputs(levels[-1], list(filter(lambda pair: t >= 250 * pair[0], enumerate(levels)))[-1][1])


class _Taken(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = self.levels(x)
        pairs = list(itertools.takewhile(lambda pair: t >= 250 * pair[0], enumerate(levels)))
        return self.outputs(levels[-1], pairs[-1][1])


class _Reduced(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        first, *later = enumerate(self.levels(x))
        selected = functools.reduce(lambda old, pair: pair if t >= 250 * pair[0] else old, later, first)
        return self.outputs(later[-1][1], selected[1])


class _NearestItem(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = self.levels(x)
        return self.outputs(levels[-1], min(enumerate(levels), key=lambda pair: abs(250 * pair[0] - t))[1])


class _Sorted(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = self.levels(x)
        return self.outputs(levels[-1], sorted(enumerate(levels), key=lambda pair: abs(250 * pair[0] - t))[0][1])


class _Sliced(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = self.levels(x)
        return self.outputs(levels[-1], next(itertools.islice(levels, t // 250, None)))


def _at_step(levels: list[Tensor], t: int) -> Tensor:
    return levels[t // 250]


class _Passed(_Selecting):
    def forward(self, x: Tensor, t: int = 500) -> Any:
        levels = self.levels(x)
        return self.outputs(levels[-1], _at_step(levels, t))


# ---------------------------------------------------------------- by a setting


class _Objects(Levels):
    def set_up(self) -> None:
        self.options = [SimpleNamespace(marked=i == 2) for i in range(4)]

    def mark(self, k: int) -> None:
        for i, options in enumerate(self.options):
            options.marked = i == k

    def forward(self, x: Tensor) -> Any:
        selected = x
        for layer, options in zip(self.layers, self.options, strict=True):
            x = layer(x)
            if options.marked:
                selected = x
        return self.outputs(x, selected)


class _Dictionaries(Levels):
    def set_up(self) -> None:
        self.levels = {i: {"marked": i == 2} for i in range(4)}

    def mark(self, k: int) -> None:
        for i, level in self.levels.items():
            level["marked"] = i == k

    def forward(self, x: Tensor) -> Any:
        selected = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.levels[i]["marked"]:
                selected = x
        return self.outputs(x, selected)


class _NestedNumber(Levels):
    def set_up(self) -> None:
        self.settings = {"head": {"tap": 2}}

    def mark(self, k: int) -> None:
        self.settings["head"]["tap"] = k

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for i, layer in enumerate(self.layers):
            if i > self.settings["head"]["tap"]:
                break
            if i:
                x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Identity(Levels):
    def set_up(self) -> None:
        self.marked: Any = self.layers[2]

    def mark(self, k: int) -> None:
        self.marked = self.layers[k]

    def forward(self, x: Tensor) -> Any:
        selected = x
        for layer in self.layers:
            x = layer(x)
            if layer is self.marked:
                selected = x
        return self.outputs(x, selected)


class _Kind(Levels):
    def set_up(self) -> None:
        self.layers[2] = nn.Linear(6, 6)
        self.kind: Any = nn.Linear

    def mark(self, k: int) -> None:
        self.kind = nn.Linear if k == 2 else nn.Sequential

    def forward(self, x: Tensor) -> Any:
        selected = x
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, self.kind):
                selected = x
        return self.outputs(x, selected)


class _Plan(Levels):
    def set_up(self) -> None:
        self.plan = [[0], [1], [0], [1]]

    def mark(self, k: int) -> None:
        self.plan = [[int(i == k)] for i in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for (chosen,), layer in zip(self.plan[1:], list(self.layers)[1:], strict=True):
            x = layer(x) if chosen else x + layer(x.sin())
        return self.head(x)  # type: ignore[no-any-return]


class _Skips(Levels):
    def set_up(self) -> None:
        self.skips = {3: [1]}

    def mark(self, k: int) -> None:
        self.skips = {3: [min(k, 2)]}

    def forward(self, x: Tensor) -> Tensor:
        levels: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            for j in self.skips.get(i, []):
                x = x + levels[j]
            x = layer(x)
            levels.append(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Grab:
    """A hook that keeps features while it is active."""

    def __init__(self, box: dict[int, Tensor], number: int) -> None:
        self.box, self.number, self.is_active = box, number, number == 2

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.is_active:
            self.box[self.number] = output


class _Hooks(Levels):
    def set_up(self) -> None:
        self.box: dict[int, Tensor] = {}
        self.grabs = [_Grab(self.box, i) for i in range(4)]
        for grab, layer in zip(self.grabs, self.layers, strict=True):
            layer.register_forward_hook(grab)

    def mark(self, k: int) -> None:
        for grab in self.grabs:
            grab.is_active = grab.number == k

    def forward(self, x: Tensor) -> Any:
        self.box.clear()
        for layer in self.layers:
            x = layer(x)
        selected = [features.square().mean(1) for features in self.box.values()]
        self.box.clear()
        return self.head(x), selected


class _Buffer(Levels):
    def set_up(self) -> None:
        self.register_buffer("marked", torch.tensor([False, False, True, False]))

    def mark(self, k: int) -> None:
        self.marked.copy_(torch.arange(4) == k)

    def forward(self, x: Tensor) -> Any:
        selected = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.marked[i]:
                selected = x
        return self.outputs(x, selected)


class _Gates(Levels):
    def set_up(self) -> None:
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor([float(i == 2)])) for i in range(4))

    def mark(self, k: int) -> None:
        for i, gate in enumerate(self.gates):
            gate.data.fill_(2.0 * (i == k) - 1)

    def forward(self, x: Tensor) -> Any:
        selected = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.gates[i] > 0:
                selected = x
        return self.outputs(x, selected)


# ---------------------------------------------------------------- by a size


class _Sizes(Levels):
    def forward(self, x: Tensor) -> Any:
        size, selected, y = len(x), x, x
        for start, layer in zip((0, 7, 15, 30), self.layers, strict=True):
            y = layer(y)
            if size >= start:
                selected = y
        return self.outputs(y, selected)


class _Nearest(Levels):
    sizes = (2, 8, 16, 32)

    def forward(self, x: Tensor) -> Any:
        count, levels, y = x.shape[0], [], x
        for layer in self.layers:
            y = layer(y)
            levels.append(y)
        return self.outputs(y, levels[min(range(4), key=lambda i: abs(self.sizes[i] - count))])


class _ByScale(Levels):
    def forward(self, x: Tensor) -> Any:
        levels, y = [], x
        for layer in self.layers:
            y = layer(y)
            levels.append(y)
        return self.outputs(y, levels[min(int(x.shape[0] / 8.5), 3)])


def marked(model: nn.Module) -> list[Any]:
    """Call a network with each of its layers marked."""
    results = []
    for k in range(4):
        model.mark(k)  # type: ignore[operator]
        results.append(called(noise(3))(model))
    return results


def _with(*values: Any) -> list[Callable[[nn.Module], Any]]:
    return [called(noise(3), value) for value in values]


def _option(name: str, source: str, make: Callable[[], nn.Module], *values: Any) -> Trap:
    return Trap(name, source, make, lambda model: noise(2), _with(*values))


def _setting(name: str, source: str, make: Callable[[], nn.Module]) -> Trap:
    return Trap(name, source, make, lambda model: noise(2), [called(noise(3)), marked])


LARGER = [called(noise(n)) for n in (9, 20, 40)]
NAMES = ("layer0", "layer1", "layer3")
CHOSEN = "features of the layer that a caller, or a method, chooses"

TRAPS = [
    Trap("the round whose number is in a tensor", CHOSEN, _TensorArgument,
         lambda model: (noise(2), torch.tensor(2)), _with(*map(torch.tensor, (0, 1, 3)))),
    _option("rounds up to a threshold", "diffusion: if t >= start", _Threshold, 0, 260, 900),
    _option("a threshold in a helper that is called again", "if t >= start", _Helper, 100, 300, 999),
    _option("the round that a text names", "return at layer{i}", _NamedEnd, *NAMES),
    _option("a break at a resolution", "progressive growing", _Break, 64, 128, 512),
    _option("rounds by flags", CHOSEN, _Flags, (True, False, False, False), (False, False, False, True)),
    _option("the round of a letter", CHOSEN, _Letter, "a", "b", "d"),
    _option("features under a key that a loop computes", "features[f'layer{i}']", _Key, *NAMES),
    _option("residuals by a schedule", "x = y if t > th else x + y", _Residuals, 1, 4, 9),
    _option("rounds by a strength", "diffusers: timesteps[int(n * strength):]", _Strength, 0.1, 0.4, 1.0),
    _option("features that a generator yields from a step on", "yield x", _Yielded, 0, 260, 800),
    _option("an attribute that rounds set", "self.features = x", _Attribute, 0, 300, 900),
    _option("filtered items", "filter(…)", _Filtered, 0, 300, 900),
    _option("items up to a threshold", "itertools.takewhile", _Taken, 0, 300, 900),
    _option("an item by a reduction", "functools.reduce", _Reduced, 0, 300, 900),
    _option("the nearest item", "min(levels, key=…)", _NearestItem, 0, 300, 900),
    _option("the first of sorted items", "sorted(levels, key=…)", _Sorted, 0, 300, 900),
    _option("a slice of an iterator", "itertools.islice", _Sliced, 0, 300, 900),
    _option("an item that a function without ops picks", "select(levels, t)", _Passed, 0, 300, 900),
    _option("the first item under a threshold", "next(f for f, end in … if t < end)", _Next, 100, 300, 900),
    _setting("rounds by flags of objects", CHOSEN, _Objects),
    _setting("rounds by a dictionary of dictionaries", CHOSEN, _Dictionaries),
    _setting("rounds up to a number in a nested dictionary", CHOSEN, _NestedNumber),
    _setting("the round of a module that an attribute holds", CHOSEN, _Identity),
    _setting("rounds of a class that an attribute holds", CHOSEN, _Kind),
    _setting("layers by a list of lists", "a searched architecture", _Plan),
    _setting("skips by a table of lists", "a searched architecture", _Skips),
    _setting("hooks of which one is active", "feature extractors", _Hooks),
    _setting("rounds by flags in a buffer", CHOSEN, _Buffer),
    _setting("rounds by gates that are parameters", "differentiable search", _Gates),
    Trap("rounds up to a size", "if size >= start", _Sizes, lambda model: noise(2), LARGER),
    Trap("the level whose size is nearest", "min(levels, key=…)", _Nearest, lambda model: noise(2), LARGER),
    Trap("the level by the scale of a size", "levels[int(size / 224)]", _ByScale, lambda model: noise(2), LARGER),
]  # fmt: skip


def _rounds_are_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FunctionCoverage, "repeated", lambda self: [])


ABLATIONS = [
    Ablation("what ran in some rounds may run in others", _rounds_are_alike, "rounds up to a threshold"),
    Ablation(
        "a generator may yield other items first",
        lambda patch: patch.setattr(Branch, "skips_results", False),
        "features that a generator yields from a step on",
    ),
    Ablation(
        "a function without ops picks from what its callers compute",
        lambda patch: patch.setattr(surroundings, "names_in", lambda code: frozenset()),
        "an item that a function without ops picks",
    ),
    Ablation(
        "comprehensions may leave other items out",
        lambda patch: patch.setattr(picked_items, "_selections", lambda tree: iter(())),
        "the first item under a threshold",
    ),
    Ablation(
        "keys that code computes may be asked for",
        lambda patch: patch.setattr(picked_items, "_has_computed_keys", lambda container, tree: False),
        "features under a key that a loop computes",
    ),
    Ablation(
        "a size may pick an item",
        lambda patch: patch.setattr(picked_items, "_is_size", lambda expr: False),
        "the level by the scale of a size",
    ),
    Ablation(
        "collections in collections choose, too",
        lambda patch: patch.setattr(attribute_choices, "DEEPEST_CHOICE", 1),
        "skips by a table of lists",
    ),
]
