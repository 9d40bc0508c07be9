"""The building blocks of the rules' samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.ops.samples import Apply, Head, chain, residual
from engine.rule import Sample

SAMPLES = [sample for rule in engine.RULES.distinct() for sample in rule.samples()]


def test_a_function_as_a_module() -> None:
    """It gets the outputs of its parts, or the input itself."""
    x = torch.randn(2, 3)
    assert torch.equal(Apply(torch.neg)(x), -x)
    assert torch.equal(Apply(residual, nn.Identity(), nn.Identity())(x), 2 * x)


def test_a_head_averages_over_positions() -> None:
    """Whatever the rank, scores of shape (batch, outputs) come out."""
    assert Head(4)(torch.randn(2, 5, 3, 3)).shape == (2, 4)
    assert Head()(torch.randn(2, 5, 3)).shape == (2, 3)


def test_a_chain_ends_in_a_head() -> None:
    """Flat or averaged, so that the last channels can go too."""
    assert chain(nn.Conv2d(3, 4, 1))(torch.randn(2, 3, 4, 4)).shape == (2, 3)
    assert chain(nn.Conv2d(3, 4, 1), flat=True)(torch.randn(2, 3, 4, 4)).shape == (2, 3)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_every_sample_runs_and_shows_an_op_with_a_rule(sample: Sample) -> None:
    """It takes an input of its shape, and no op of it that makes a tensor is unknown."""
    model = sample.make()
    model(torch.randn(sample.shape))
    made = {node.op for node in engine.trace(model, torch.randn(sample.shape)).nodes if node.outputs}
    assert made <= set(engine.RULES)
