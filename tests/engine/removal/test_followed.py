"""Numbers of the user's that nobody could check from a file are not set."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.removal import demands
from tests.engine.attentions import without_heads
from tests.engine.compaction.test_numbers import Heads
from tests.engine.exactness import masked, randomised


def small(masks: Mapping[str, Mapping[str, Tensor]]) -> Heads:
    """The attention with masked heads, compacted; it computes what the masked one does."""
    model, x = randomised(Heads()), torch.randn(2, 3, 8).double()
    reference = masked(model, masks)(x)
    engine.ModelSpeedup(model, x, masks).speedup_model()
    assert torch.allclose(model(x), reference, atol=1e-12)
    return model


def test_heads_follow_from_the_weights_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set; where nothing said so, the heads would stay."""
    masks = {"qkv": without_heads(nn.Linear(8, 24), [1, 2])}
    assert small(masks).heads == 2
    monkeypatch.setattr(demands, "followed", lambda shrunk, wishes: {})
    assert small(masks).heads == 4
