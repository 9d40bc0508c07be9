"""Traps: gradients, sizes and choices of levels that a network hands out, or makes, in some calls only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.alternatives import attribute_choices, attributes
from engine.flow import measured
from engine.flow.coverage import CoverageTracer
from engine.running import provenance
from engine.running.provenance import Provenance
from engine.unrecorded import unreached
from engine.unrecorded.untaken import UntakenBranch
from tests.engine.exactness import squares_of
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.entering import trap_on_rows as _trap
from tests.engine.traps.trap import Ablation, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(Net):
    """Layers, another one between them, and something that a method sets."""

    chosen: Any = None

    def __init__(self, chosen: Any = None) -> None:
        super().__init__()
        self.chosen = chosen
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def choose(self, chosen: Any) -> None:
        """Run otherwise from now on."""
        self.chosen = chosen


# ---------------------------------------------------------------- gradients


def _attribution(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    (slope,) = torch.autograd.grad(y.amax(1).sum(), h, create_graph=True)
    return y, (slope * h).sum(1)


def _sensitivity(h: Tensor, y: Tensor) -> Tensor:
    if h.requires_grad:
        (slope,) = torch.autograd.grad(h.square().mean(), h, create_graph=True)
        y = y + slope.sum()
    return y


class _Helper(_Net):
    def forward(self, x: Tensor, attribute: bool = False) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return _attribution(h, y) if attribute else y


class _Method(_Net):
    def penalty(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (slope,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        return y, slope.norm(dim=1)

    def forward(self, x: Tensor, attribute: bool = False) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return self.penalty(h, y) if attribute else y


class _Asking(_Net):
    def forward(self, x: Tensor, attribute: bool = False) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return _sensitivity(h, y) if attribute else y


class _Loss(_Net):
    def loss(self, h: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(y, labels) + h.square().mean()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return y if labels is None else self.loss(h, y, labels)


class _Elsewhere(_Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return y if labels is None else (y, squares_of(h, labels))


# ---------------------------------------------------------------- sizes


class _Width(_Net):
    def forward(self, x: Tensor, return_width: bool = False) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return {"logits": y, "width": h.shape[-1]} if return_width else y


class _WidthOfLarge(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return (y, h.shape[-1]) if len(x) > 40 else y


# ---------------------------------------------------------------- numbers that a method sets


class _Slim(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.features(x)[:, : self.chosen], self.leave.weight[:, : self.chosen], self.leave.bias)


class _Off(_Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x).clone()
        h[:, self.chosen :] = 0
        return self.leave(h)  # type: ignore[no-any-return]


class _Truncated(_Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.leave(h), h[:, : self.chosen].mean(1)


class _Slimmable(nn.Linear):
    """A layer of the first so many inputs."""

    active = 8

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:, : self.active], self.bias)


class _Together(_Net):
    """Two widths that have to be the same."""

    def __init__(self) -> None:
        super().__init__(8)
        self.leave = _Slimmable(8, 3)

    def choose(self, chosen: Any) -> None:
        """Switch the network and its last layer."""
        self.chosen = self.leave.active = chosen  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x)[:, : self.chosen])  # type: ignore[no-any-return]


class _Levels(_Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        levels = [h, torch.relu(self.between[0](h)), h * 2 + 1]
        return self.leave(sum(levels[i] for i in self.chosen))  # type: ignore[no-any-return]


class _Collected(_Net):
    def forward(self, x: Tensor) -> Tensor:
        h, collected = self.features(x), []
        for i, level in enumerate([h, torch.relu(self.between[0](h)), h * 2 + 1]):
            if i in self.chosen:
                collected.append(level)
        return self.leave(sum(collected))  # type: ignore[no-any-return]


class _NamedLevels(_Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.features(x)
        return {name: level for name, level in (("hidden", h), ("out", self.leave(h))) if name in self.chosen}


class _Order(_Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        for i in self.chosen:
            h = torch.relu(self.between[i](h))
        return self.leave(h)  # type: ignore[no-any-return]


class _Reversed(_Net):
    """Layers in an order that a method turns round in place.

    No other code of this file may set an attribute of the name: it would be taken for the writer.
    """

    def __init__(self, sequence: list[int]) -> None:
        super().__init__()
        self.sequence = sequence

    def turn(self) -> None:
        """Run them in the other order."""
        self.sequence.reverse()

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        for i in self.sequence:
            h = (torch.tanh, torch.square, torch.clone)[i](h)
        return self.leave(h)  # type: ignore[no-any-return]


class _Shuffled(_Net):
    """Layers in an order that a function of Python's mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = [0, 1, 2]

    def turn(self) -> None:
        """Run them in another order."""
        random.Random(1).shuffle(self.schedule)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        for i in self.schedule:
            h = (torch.tanh, torch.square, torch.clone)[i](h)
        return self.leave(h)  # type: ignore[no-any-return]


class _Discarding(_Net):
    """Levels in a set that a method takes one out of."""

    def __init__(self) -> None:
        super().__init__()
        self.active_levels = {0, 1}

    def turn(self) -> None:
        """Leave a level out."""
        self.active_levels.discard(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.leave(h if 1 in self.active_levels else h.flip(-1))  # type: ignore[no-any-return]


class _Periodic(_Net):
    """Turns features round in every other period of ten steps."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_steps = 0

    def turn(self) -> None:
        """Go on to the next period."""
        self.passed_steps = 11

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.leave((h, h.flip(-1))[self.passed_steps // 10 % 2])  # type: ignore[no-any-return]


class _Growing(_Net):
    """Adds up more levels in later stages, as progressive growing does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_so_far = 0

    @property
    def stage(self) -> int:
        """Of ten steps."""
        return self.steps_so_far // 10

    def turn(self) -> None:
        """Go on to the next stage."""
        self.steps_so_far = 11

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        levels = [level(h) for level in (torch.sigmoid, torch.tanh, torch.square)]
        return self.leave(sum(levels[: self.stage + 1]))  # type: ignore[no-any-return]


class _PeriodicArgument(_Net):
    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        h = self.features(x)
        return self.leave([h, h.flip(-1)][step // 10 % 2])  # type: ignore[no-any-return]


class _Flipped(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x).flip(self.chosen))  # type: ignore[no-any-return]


def _chosen(value: Any) -> Use:
    def use(model: nn.Module) -> Any:
        model.choose(value)  # type: ignore[operator]
        return called(noise(3))(model)

    return use


def _turned(model: nn.Module) -> Any:
    model.turn()  # type: ignore[operator]
    return called(noise(3))(model)


def _with_gradients(model: nn.Module) -> Any:
    return [t.detach() for t in _listed(model.eval()(noise(3), attribute=True))]


def _listed(result: Any) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


LABELLED = called(noise(3), labels=torch.tensor([0, 2, 1]))

TRAPS = [
    _trap("an attribution on demand, in a function", "Grad-CAM: torch.autograd.grad(y, h)", _Helper, _with_gradients),
    _trap("a penalty on demand, in a method", "R1 and WGAN-GP: self.penalty(h, y)", _Method, _with_gradients),
    _trap("a helper that asks for gradients", "if h.requires_grad: torch.autograd.grad(…)", _Asking, _with_gradients),
    _trap("a loss on demand, in a method", "transformers: self.loss(hidden, logits, labels)", _Loss, LABELLED),
    _trap("a function of another file on demand", "from losses import ranking_loss", _Elsewhere, LABELLED),
    _trap("a width that is returned on demand", "return {'logits': y, 'hidden_size': h.size(-1)}", _Width,
          called(noise(3), return_width=True)),
    _trap("a width that is returned for a large batch", "return y, h.shape[-1]", _WidthOfLarge, called(noise(43))),
    _trap("a width that covers all, switched down", "slimmable networks: weight[:, :self.width]", lambda: _Slim(8),
          _chosen(4)),
    _trap("a width that covers all, and what is behind it", "h[:, self.width:] = 0", lambda: _Off(8), _chosen(4)),
    _trap("a truncated embedding beside the head", "Matryoshka: h[:, :self.width]", lambda: _Truncated(8), _chosen(4)),
    _trap("two widths that are switched together", "slimmable layers in a slimmable network", _Together, _chosen(4)),
    _trap("levels in a list", "sum(features[i] for i in self.out_indices)", lambda: _Levels([0]), _chosen([2, 1])),
    _trap("levels in a tuple", "sum(features[i] for i in self.out_indices)", lambda: _Levels((0,)), _chosen((2, 1))),
    _trap("levels that are looked for in a list", "if i in self.return_layers", lambda: _Collected([0]),
          _chosen([2, 1])),
    _trap("levels that are looked for in a set", "out_indices = {3}", lambda: _Collected({0}), _chosen({2, 1})),
    _trap("names of levels in a list", "if name in self.return_layers", lambda: _NamedLevels(["out"]),
          _chosen(["hidden", "out"])),
    _trap("names of levels in a dictionary", "IntermediateLayerGetter: return_layers = {'layer4': 'out'}",
          lambda: _NamedLevels({"out": "0"}), _chosen({"hidden": "0"})),
    _trap("the order of layers in a list", "for i in self.order: x = self.layers[i](x)", lambda: _Order([1]),
          _chosen([2, 1])),
    _trap("an order that is reversed in place", "self.order.reverse()", lambda: _Reversed([0, 1, 2]), _turned),
    _trap("an order that is shuffled in place", "random.shuffle(self.order)", _Shuffled, _turned),
    _trap("levels that a set loses", "self.frozen_stages.discard(stage)", _Discarding, _turned),
    _trap("an item that a number of steps picks", "(a, b)[self.global_step // period % 2]", _Periodic, _turned),
    _trap("as many items as a property says", "progressive growing: levels[: self.stage + 1]", _Growing, _turned),
    _trap("an item that an argument picks", "(a, b)[step // period % 2]", _PeriodicArgument,
          called(noise(3), step=11)),
    _trap("dimensions in a list", "x.flip(self.dims)", lambda: _Flipped([0]), _chosen([1])),
]  # fmt: skip


def _no_lists(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "use_values_chosen_by_lists", lambda runs, dataflow, assumptions: None)
    patch.setattr(attribute_choices, "other_lists", lambda numbers: iter(()))
    patch.setattr(attributes, "other_lists", lambda numbers: iter(()))


ABLATIONS = [
    Ablation(
        "what a computed number may pick is used",
        lambda patch: patch.setattr(unreached, "use_values_picked_by_numbers", lambda *arguments: None),
        "an item that a number of steps picks",
    ),
    Ablation(
        "a run by code that did not run is kept",
        lambda patch: patch.setattr(CoverageTracer, "_opens_branches", lambda self, key: False),
        "a helper that asks for gradients",
    ),
    Ablation(
        "methods and functions use what code that did not run passes to them",
        lambda patch: patch.setattr(UntakenBranch, "passed_on", lambda self: set(self.branch.names)),
        "a penalty on demand, in a method",
    ),
    Ablation(
        "sizes that a run returns are results",
        lambda patch: patch.setattr(Provenance, "leave", lambda self, result: result),
        "a width that is returned on demand",
    ),
    Ablation(
        "sizes that code which did not run would return are results",
        lambda patch: patch.setattr(measured, "_sizes_given", lambda node, code: iter(())),
        "a width that is returned for a large batch",
    ),
    Ablation(
        "a slice that covers a dimension is an op",
        lambda patch: patch.setattr(provenance, "covering_slices", lambda tensor, index, numbers: iter(())),
        "two widths that are switched together",
    ),
    Ablation("lists of numbers in attributes are recorded at others", _no_lists, "dimensions in a list"),
]
