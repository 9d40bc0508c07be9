"""What values look like once slots are removed."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.removal.propagate import propagate
from engine.removal.shrink import Shrunk
from tests.engine.exactness import randomised
from tests.engine.nets import Mean, image, plain, structure


def removed(model: nn.Module, name: str, rows: list[int]) -> Shrunk:
    """Remove output channels of a layer."""
    found = structure(model, image())
    keep = torch.ones(len(found.roots), dtype=torch.bool)
    keep[found.along(found.graph.stored[name], 0)[rows]] = False
    return Shrunk(found, keep)


def test_shapes_of_values_and_parameters() -> None:
    """Producer, norm, activation and consumer shrink; nothing else does."""
    shrunk = removed(plain(), "0.weight", [0, 5])
    stored = shrunk.structure.graph.stored
    assert [shrunk.shape(stored[n]) for n in ("0.weight", "0.bias", "1.running_var", "3.weight", "3.bias")] == [
        (4, 3, 3, 3),
        (4,),
        (4,),
        (5, 4, 3, 3),
        (5,),
    ]
    nodes = {n.module: n for n in shrunk.structure.graph.nodes}
    assert shrunk.shape(nodes["2"].output) == (2, 4, 6, 6) and shrunk.shape(nodes["3"].output) == (2, 5, 6, 6)


def test_indices_and_masks() -> None:
    """Which channels stay; None where nothing can go or all stay."""
    shrunk = removed(plain(), "0.weight", [0, 5])
    node = next(n for n in shrunk.structure.graph.nodes if n.module == "2")
    assert shrunk.indices(node.output, 1).tolist() == [False, True, True, True, True, False]
    assert shrunk.indices(node.output, 2) is None
    assert shrunk.mask(shrunk.structure.graph.stored["0.weight"]).shape == (6, 1, 1, 1)
    assert shrunk.mask(shrunk.structure.graph.stored["7.weight"]) is None


def test_attributes_that_change() -> None:
    """By module, only those that differ."""
    shrunk = removed(plain(), "0.weight", [0, 5])
    assert shrunk.attributes() == {"0": {"out_channels": 4}, "1": {"num_features": 4}, "3": {"in_channels": 4}}


def test_rows_of_a_grouped_weight() -> None:
    """Its columns are inputs per group."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3, groups=2), Mean(), nn.Linear(6, 2)))
    shrunk = removed(model, "0.weight", [0, 7])
    assert shrunk.shape(shrunk.structure.graph.stored["1.weight"]) == (6, 3, 3, 3)
    whole = removed(model, "0.weight", [4, 5, 6, 7])
    keep = whole.keep
    keep[whole.structure.along(whole.structure.graph.stored["1.weight"], 0)[3:]] = False
    assert Shrunk(whole.structure, keep).attributes()["1"] == {"in_channels": 4, "out_channels": 3, "groups": 1}


def test_rows_that_keep_entries_of_their_own() -> None:
    """The states of two layers lose a unit each, not the same: what is left of them is a rectangle."""
    layer = nn.GRU(3, 4, 2, batch_first=True)
    found = propagate(engine.trace(layer, torch.zeros(2, 5, 3)), engine.RULES)
    states = found.graph.nodes[-1].outputs[1]
    (rows,) = found.of(states)
    assert rows.shape == (2, 1, 4) and found.along(states, 0) is None
    keep = torch.ones(len(found.roots), dtype=torch.bool)
    keep[rows[[0, 1], 0, [1, 2]]] = False
    assert Shrunk(found, keep).shape(states) == (2, 2, 3)
