"""The compact pattern of non-zero weights answers as the full one does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.analysis.links import Links

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Conv2d(4, 6, 3),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
    "grouped transposed": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
}
ARRAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "entries": lambda w: w > 0,
    "rows": lambda w: w[:, :1, :1, :1] > 0,
    "columns": lambda w: w[:1, :, :1, :1] > 0,
    "one": lambda w: w[:1, :1, :1, :1] > -9,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("array", ARRAYS)
def test_compact_patterns_answer_as_full_ones(layer: str, array: str) -> None:
    """``reached``, ``feeding``, ``outputs`` and ``dense`` for every layout of a weight and every compact shape."""
    torch.manual_seed(0)
    module = LAYERS[layer]()
    graph = engine.trace(module, torch.zeros(1, 4, 5, 5))
    c = engine.RULES.contraction(graph.nodes[-1])
    weight = torch.randn_like(module.weight)
    small = ARRAYS[array](weight)
    links = Links.of(c, small)
    full = c.canonical(small.expand(weight.shape)).any(-1)
    assert torch.equal(links.dense(), full) and torch.equal(links.outputs(), full.any(2))
    for _ in range(3):
        inputs, outputs = torch.rand(c.groups, c.inputs) > 0.6, torch.rand(c.groups, c.outputs) > 0.6
        assert (links.reached(inputs.numpy()) == (full & inputs[:, None]).any(2).numpy()).all()
        assert (links.feeding(outputs.numpy()) == (full & outputs[:, :, None]).any(1).numpy()).all()
