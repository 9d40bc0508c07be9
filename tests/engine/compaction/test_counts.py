"""Numbers of layers and what is removed from their weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.compaction.compact import Compaction
from engine.compaction.counts import changed_sizes, check_counts
from engine.compaction.slices import Slice
from engine.errors import PlanError

ROWS = torch.tensor([0, 2, 4])


def network() -> nn.Sequential:
    """A grouped convolution, a norm without weights and a layer that reads them."""
    layers = nn.Conv2d(4, 8, 1, groups=4), nn.BatchNorm2d(8, affine=False), nn.Flatten(), nn.Linear(8, 2)
    return nn.Sequential(*layers).double()


def plan() -> engine.Plan:
    """Half of the groups go."""
    model, alive = network(), torch.tensor([1, 1, 0, 0, 1, 1, 0, 0])
    masks = {"0": {"weight": alive.view(8, 1, 1, 1), "bias": alive}}
    first = nn.Conv2d(3, 4, 1).double()
    model = nn.Sequential(first, *model)
    masks = {"1": masks["0"], "0": {"weight": alive[::2].view(4, 1, 1, 1).expand(4, 3, 1, 1), "bias": alive[::2]}}
    return engine.ModelSpeedup(model, torch.randn(2, 3, 1, 1).double(), masks).plan


def test_a_plan_of_our_own_agrees() -> None:
    """With grouped convolutions and norms that have no weights."""
    own = plan()
    assert own.attributes["1"]["groups"] == 2
    model = own.apply(nn.Sequential(nn.Conv2d(3, 4, 1).double(), *network()))
    assert model[1].groups == 2 and model[2].num_features == 4


@pytest.mark.parametrize(
    ("module", "attributes"),
    [("1", {"groups": 1}), ("4", {"out_features": 1}), ("4", {"in_features": 3}), ("2", {"num_features": 3})],
)
def test_numbers_that_weights_do_not_become(module: str, attributes: dict[str, int]) -> None:
    """Refused by name, and the model is as it was: the function would be another one, or none."""
    own = plan()
    wrong = dataclasses.replace(own, attributes={**own.attributes, module: attributes})
    model = nn.Sequential(nn.Conv2d(3, 4, 1).double(), *network())
    before = repr(model)
    with pytest.raises(PlanError, match=f"sets `{next(iter(attributes))}` of '{module}'"):
        wrong.apply(model)
    assert repr(model) == before


def test_heads_without_their_rows() -> None:
    """Fewer heads over the same rows are another attention."""
    attention = nn.MultiheadAttention(8, 4)
    with pytest.raises(PlanError, match="`num_heads`.*from 4 to 2.*removes nothing"):
        engine.Plan(attributes={"": {"num_heads": 2}}).apply(attention)
    assert attention.num_heads == 4


@pytest.mark.parametrize(("name", "old", "new", "fine"), [("out_features", 6, 3, True), ("in_features", 4, 3, False)])
def test_sizes_before_and_after(name: str, old: int, new: int, fine: bool) -> None:
    """By identity, so that a shared weight counts for all its owners; a layer without tensors is not asked."""
    layer = nn.Linear(4, 6)
    assert getattr(layer, name) == old
    sizes: Any = changed_sizes(layer, {id(layer.weight): Slice.along(0, ROWS, (6, 4))})
    assert sizes == {(6, 3)} and changed_sizes(nn.GroupNorm(2, 4, affine=False), {}) is None
    if fine:
        check_counts("fc", layer, {name: new}, sizes)
        return
    with pytest.raises(PlanError, match=name):
        check_counts("fc", layer, {name: new}, sizes)


def test_a_change_that_sets_no_numbers() -> None:
    """Nothing is asked."""
    Compaction(nn.Linear(2, 2)).add_attributes({})
