"""Ops that read every channel at positions given by other tensors: regions of interest, sampling grids.

Every channel becomes the same weighted mean, or maximum, of some of its positions: a constant channel becomes that
constant times a map, which is below 1 where a position lies outside the image. The map depends on the positions only,
so all channels share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.samples import Apply, chain
from engine.program.arrays import uniform
from engine.program.graph import Node
from engine.rule import Rule, Sample

__all__ = ["RULES"]


def _labels(node: Node, labels: Labels) -> None:
    """Propagate channels; freeze positions and the tensors that select them."""
    source = node.inputs[0]
    labels.claim(source)
    for place in node.inputs[1:]:
        labels.freeze(place, f"{node!r} reads where it says")
    for layer in labels.without(source, [d for d in range(source.ndim) if d != 1], f"{node!r} reads places of it"):
        for value in node.outputs:
            labels.add(value, layer)


def _constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    for value in node.outputs:
        constants.mark_profile(value)
    source = node.inputs[0]
    array = uniform(constants.plain(source), [d for d in range(source.ndim) if d != 1])
    return [array.reshape([-1 if d == 1 else 1 for d in range(node.outputs[0].ndim)])] * len(node.outputs)


def _use(node: Node, use: Use) -> None:
    used, source = use[node.outputs[0]], node.inputs[0]
    for dim in range(used.ndim):
        used = used if dim == 1 else used.any(dim, keepdim=True)
    use.add(source, used.reshape([-1 if d == 1 else 1 for d in range(source.ndim)]))
    for place in node.inputs[1:]:
        use.add_all(place)


# ---------------------------------------------------------------- samples


def _grid(x: Tensor) -> Tensor:
    """Return sampling positions, some outside the image, from the first two channels."""
    return x[:, :2].permute(0, 2, 3, 1) * 0.7


class _Grid(Apply):
    """Sample features at positions taken from the image."""

    def __init__(self, **options: str) -> None:
        super().__init__(lambda x: x)
        self.body = chain_of_two()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        first, last = self.body[0], self.body[1:]
        scores: Tensor = last(F.grid_sample(first(x), _grid(x), align_corners=False, **self.options))
        return scores


def chain_of_two() -> torch.nn.Sequential:
    """Two convolutions and a head; the caller fills in what lies between."""
    return chain(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 3, padding=1))


def _samples() -> Iterable[Sample]:
    yield Sample(_Grid, (2, 3, 6, 6), "sampled, zeros outside")
    yield Sample(lambda: _Grid(padding_mode="border", mode="nearest"), (2, 3, 6, 6), "sampled, borders outside")


RULES = [
    Rule(
        (
            "grid_sampler",
            "grid_sampler_2d",
            "grid_sampler_3d",
            "torchvision::roi_align",
            "torchvision::roi_pool",
        ),
        _labels,
        _constants,
        _use,
        elementwise=1,
        samples=_samples,
    )
]
