"""A user's own op and criterion, on a few digits."""

from __future__ import annotations

from pathlib import Path

import own_op_and_criterion as example
import torch
from torch import nn

import engine
from tests.examples import small


def test_channels_go_through_the_op_by_the_criterion(tmp_path: Path) -> None:
    """The rule holds under each kind of mask; the op's own parameter shrinks along; exact."""
    found = small.run(example, tmp_path)
    assert found["kinds of masks that the rule was checked with"] >= 3
    assert found["bounds"] == (24, 12) and found["MACs"][1] < 0.35 * found["MACs"][0]
    assert found["error of the compaction"] <= 1e-9


def test_the_criterion_scores_filters_by_their_spread() -> None:
    """Of coupled layers the sum."""
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 1))
    group = engine.dependency_groups(net, torch.zeros(1, 1, 8, 8))[0]
    with torch.no_grad():
        net[0].weight[1] = 0.5
    scores = example.spread(group, net.get_parameter)
    assert scores.argmin() == 1 and scores[1] < 1e-6
    assert torch.allclose(scores, net[0].weight.flatten(1).std(1))


def test_gradients_pass_where_nothing_is_clipped() -> None:
    """As those of clamp."""
    x = torch.tensor([0.5, 2.0, -2.0]).view(1, 3, 1, 1).requires_grad_()
    example.bounded(x, torch.ones(3)).sum().backward()
    assert x.grad.flatten().tolist() == [1, 0, 0]
