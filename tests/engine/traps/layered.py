"""Traps: layers in a container that a method iterates over, and what it does with the values between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.observations import surroundings
from engine.unrecorded.unreached import _UntakenBranches
from tests.engine.traps.entering import called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Layers(nn.Module):
    """Layers in a list, of which each knows its place; the method around them runs no op of its own."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4, 8, 8, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(i, o), nn.Sigmoid()) for i, o in zip(sizes, sizes[1:], strict=False)
        )
        for place, layer in enumerate(self.layers):
            layer.place = place  # type: ignore[assignment]


class _Embedded(_Layers):
    """Gives the features of the layers that are asked for, as Ultralytics' ``embed`` does."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.predict(x, *args, **kwargs)

    def predict(self, x: Tensor, embed: list[int] | None = None) -> Any:
        embeddings: list[Tensor] = []
        places = frozenset(embed) if embed is not None else {-1}
        last = max(places)
        for layer in self.layers:
            x = layer(x)
            if layer.place in places:
                embeddings.append(x.mean(1))
                if layer.place == last:
                    return torch.stack(embeddings)
        return x


class _Levels(_Layers):
    """Gives the results of layers that a method chooses, as a backbone does."""

    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.levels = chosen

    def choose(self, chosen: Any) -> None:
        """Give those of others from now on."""
        self.levels = chosen

    def forward(self, x: Tensor) -> list[Tensor]:
        results = []
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place in self.levels:
                results.append(x)
        return results


class _Stepwise(_Layers):
    """Gives the result of one more layer in each period of ten steps, beside the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_done = 0

    def choose(self, steps: int) -> None:
        """Go on to a step."""
        self.steps_done = steps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for layer in self.layers:
            results.append(layer(results[-1] if results else x))
        return results[-1], results[-1 - self.steps_done // 10]


class _Inner(nn.Module):
    """Calls the parts of its parts itself; the method around them runs no op of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"first": nn.Linear(4, 8), "act": nn.Sigmoid()})
        self.body["last"] = nn.Linear(8, 3)
        self.levels = {"last"}

    def choose(self, levels: Any) -> None:
        """Give the results of other parts from now on."""
        self.levels = levels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        results = {}
        for name, part in self.body.items():
            x = part(x)
            results[name] = x
        return {name: results[name] for name in self.levels}


def _chosen(value: Any) -> Use:
    def use(model: nn.Module) -> Any:
        model.choose(value)  # type: ignore[operator]
        return called(noise(3))(model)

    return use


def _trap(name: str, source: str, make: Callable[[], nn.Module], *uses: Use, **options: Any) -> Trap:
    return Trap(name, source, make, lambda model: noise(2), [called(noise(3)), *uses], **options)


TRAPS = [
    _trap("features of numbered layers on demand", "Ultralytics: if m.i in embed", _Embedded,
          called(noise(3), [1]), called(noise(3), embed=[0, 1])),
    _trap("features of numbered layers that are declared never to be asked for", "constants=['embed']", _Embedded,
          called(noise(3)), trace=lambda model: {"constants": ["embed"]}, shrinks=True),
    _trap("levels in a list, of layers in another", "if i in self.out_indices", lambda: _Levels([2]), _chosen([0, 2])),
    _trap("levels in a set, of layers in a list", "if i in self.out_indices", lambda: _Levels({2}), _chosen({0, 2})),
    _trap("a level by the number of steps, of layers in a list", "results[step // period]", _Stepwise, _chosen(11)),
    _trap("levels by name, of layers in a dictionary", "IntermediateLayerGetter", _Inner, _chosen({"act"})),
]  # fmt: skip


def _children_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(surroundings, "_callee", lambda name, node: name if node.module == name else ".")


ABLATIONS = [
    Ablation(
        "a condition on an argument is none on sizes",
        lambda patch: patch.setattr(_UntakenBranches, "_options_tested", lambda self, branch: set()),
        "features of numbered layers on demand",
    ),
    Ablation(
        "code handles what passes between the parts that it calls",
        _children_alone,
        "a level in keyword arguments",
    ),
]
