"""Predictions of what a model costs without some units."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import engine
from engine.cost.predict import Predictor
from engine.errors import InputError
from engine.sensitivity.importance import cut
from tests.engine.nets import image, residual_net


def grouped() -> nn.Module:
    """Grouped and depthwise convolutions, a gated unit."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 1, groups=2), nn.Conv2d(12, 12, 3, groups=12), nn.GLU(1),
        nn.Conv2d(6, 4, 1),
    ).double()  # fmt: skip


def vit() -> nn.Module:
    """Heads, neurons and the token stream."""
    return torchvision.models.VisionTransformer(6, 3, 2, 2, 8, 16, num_classes=3)


@pytest.mark.parametrize("make", [residual_net, grouped, vit])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_the_full_count_says(make: object, seed: int) -> None:
    """The same integers as `count_flops_params` under the masks, for random units, equally many of each row."""
    torch.manual_seed(seed)
    model, x = make(), image() if make is not vit else torch.rand(2, 3, 6, 6)
    graph = engine.trace(model, x)
    groups = engine.dependency_groups(model, x, graph=graph)
    keep = {g.name: cut(torch.rand(g.size), float(torch.rand(())), g.rows) for g in groups if g.reason is None}
    masks = engine.group_masks(groups, keep)
    exact = engine.count_flops_params(model, x, verbose=False, masks=masks, graph=graph)
    assert Predictor(model, graph, groups)(keep) == exact[:2]


def test_unknown_groups_are_errors() -> None:
    """A name that no group has, or a wrong length, is named."""
    model = residual_net()
    graph = engine.trace(model, image())
    predict = Predictor(model, graph, engine.dependency_groups(model, image(), graph=graph))
    with pytest.raises(InputError, match="'nothing'"):
        predict({"nothing": torch.ones(3, dtype=torch.bool)})
