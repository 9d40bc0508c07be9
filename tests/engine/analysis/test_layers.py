"""All layers of a structure side by side."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.analysis.layers import Layers
from engine.program.arrays import support
from engine.removal.propagate import propagate
from engine.removal.shrink import Shrunk


def test_one_look_counts_what_each_layer_keeps() -> None:
    """Every layer's count is what a look at that layer alone gives, at every choice."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1, groups=2), nn.Flatten())
    structure = propagate(engine.trace(net, torch.zeros(1, 3, 5, 5)), engine.RULES)
    for seed in range(3):
        keep = torch.rand(len(structure.roots), generator=torch.Generator().manual_seed(seed)) < 0.5
        counts = structure.table.counts(structure.table.look(keep))
        parts = structure.table.parts(structure.table.look(keep))
        for value in structure.graph.values:
            places = structure.table.touched(value.index)
            for layer, (dims, place) in zip(structure.of(value), places, strict=True):
                assert dims == support(layer) and counts[place] == int(keep[layer].sum())
                assert torch.equal(parts[place].view(layer.shape), keep[layer])


def test_dimensions_that_hang_together_have_no_rows() -> None:
    """A layer over two dimensions, or two layers over one, are not a product of index sets."""
    joint, row = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])
    layers = Layers({0: (joint,), 1: (row, row.clone()), 2: (row,)})
    assert layers.of(0) is None and layers.of(1) is None and layers.of(2) == ((1, 1),)
    assert layers.of(9) == () and layers.touched(9) == ()


def test_a_graph_without_slots() -> None:
    """Nothing to look at is nothing that goes."""
    structure = propagate(engine.trace(nn.ReLU(), torch.zeros(2, 3)), engine.RULES)
    shrunk = Shrunk(structure, torch.ones(len(structure.roots), dtype=torch.bool))
    assert [shrunk.shape(v) for v in structure.graph.values] == [(2, 3), (2, 3)]
