"""Which layers are worth being set apart from what their output is added to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.compaction.build import analyse
from engine.compaction.spreading import candidates
from engine.masks import canonical_masks
from tests.engine.exactness import randomised
from tests.engine.nets import Net, image
from tests.engine.surgery.kinds.test_spread import IMAGE, Residual, contradicting


def found(model: nn.Module, masks: dict[str, dict[str, torch.Tensor]], pays: float) -> dict[str, int]:
    """Layers that save so many multiply-accumulates per entry."""
    graph = engine.trace(model, IMAGE)
    return candidates(analyse(model, graph, engine.RULES, canonical_masks(masks, model)), pays)


def test_the_last_layer_before_a_sum_is_named() -> None:
    """The norm behind the convolution, and the dimension of its channels."""
    model = randomised(Residual())
    assert found(model, contradicting(model, True), 20.0) == {"two_norm": 1}
    assert found(model, {}, 0.0) == {}


@pytest.mark.parametrize("twice", [False, True])
def test_a_layer_that_is_called_twice_is_left(twice: bool) -> None:
    """Its two outputs would have to be spread alike."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        y = torch.tanh(x + m.one(x))
        return m.head((y + m.one(y) if twice else y).mean((2, 3)))

    parts = {"stem": nn.Conv2d(3, 8, 1), "one": nn.Conv2d(8, 8, 3, padding=1), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, **parts))
    kept = torch.arange(8) > 3
    masks = {"one": {"weight": kept.view(-1, 1, 1, 1).expand(8, 8, 3, 3), "bias": kept}}
    graph = engine.trace(model, image())
    names = candidates(analyse(model, graph, engine.RULES, canonical_masks(masks, model)), 1.0)
    assert names == ({} if twice else {"one": 1})
