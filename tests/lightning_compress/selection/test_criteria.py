"""Tests of the criteria."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import engine
from lightning_compress.selection import criteria
from lightning_compress.selection.evidence import Evidence
from tests.lightning_compress.models import Net, seeded

BY_WEIGHT = sorted(name for name, function in criteria.CRITERIA.items() if not criteria.needs(function))
GATHERED = {
    "loss_change": torch.arange(16.0),
    "squared_change": torch.arange(16.0),
    "reconstruction": torch.arange(16.0),
    "active": torch.arange(16.0) / 16,
    "magnitude": torch.arange(16.0),
}


@pytest.fixture(scope="module")
def net() -> Net:
    """A network with random weights."""
    found: Any = seeded(Net)
    with torch.no_grad():
        for norm in (found.norm, found.wide_norm):
            norm.weight.normal_()
    return found


@pytest.fixture(scope="module")
def groups(net: Net) -> dict[str, engine.Group]:
    """Its groups by name."""
    return {group.name: group for group in engine.dependency_groups(net, torch.ones(1, 3, 8, 8))}


def evidence(net: Net, kept: Any = None) -> Evidence:
    """All that a criterion may want to know, of the group `wide`."""
    gathered = {kind: {"wide": value} for kind, value in GATHERED.items()}
    return Evidence(net.get_parameter, {} if kept is None else {"wide": kept}, gathered)


def test_l1_sums_over_all_layers_of_the_group(net: Net, groups: dict[str, engine.Group]) -> None:
    """The residual group's score is the sum over both convolutions that put the channel out, biases and norms left
    out.
    """
    expected = net.stem.weight.abs().sum((1, 2, 3)) + net.back.weight.abs().sum((1, 2, 3))
    torch.testing.assert_close(criteria.l1(groups["stem"], evidence(net)), expected.detach())


def test_l2_is_the_norm_over_the_group(net: Net, groups: dict[str, engine.Group]) -> None:
    """The score is the Euclidean norm of the weights of each channel."""
    expected = net.wide.weight.flatten(1).norm(dim=1)
    torch.testing.assert_close(criteria.l2(groups["wide"], evidence(net)), expected.detach())


def test_fpgm_leaves_masked_neighbours_out(net: Net, groups: dict[str, engine.Group]) -> None:
    """The distance is that to the channels that are left."""
    kept = torch.arange(16) > 5
    rows = net.wide.weight.detach().flatten(1)
    found = criteria.fpgm(groups["wide"], evidence(net, kept))
    assert not found[~kept].any()
    torch.testing.assert_close(found[kept], torch.cdist(rows[kept], rows[kept]).sum(1))


def test_bn_scale_is_gamma(net: Net, groups: dict[str, engine.Group]) -> None:
    """|γ| of the norm behind the convolution; a group without a norm is not scored, rather than taken as zero."""
    assert torch.equal(criteria.bn_scale(groups["wide"], evidence(net)), net.wide_norm.weight.detach().abs())
    assert criteria.bn_scale(groups["fc"], evidence(net)) is None


def test_lamp_is_the_share_of_what_is_left(net: Net, groups: dict[str, engine.Group]) -> None:
    """The largest has 1, each other its square over the sum of the squares that are not smaller."""
    squares = criteria.l2(groups["wide"], evidence(net)).square()
    expected = torch.stack([s / squares[squares >= s].sum() for s in squares])
    torch.testing.assert_close(criteria.lamp(groups["wide"], evidence(net)), expected)


def test_what_was_gathered_is_the_score(net: Net, groups: dict[str, engine.Group]) -> None:
    """Taylor, APoZ and mean activation read their statistic; without one, or of another width, they know nothing."""
    kinds = {"taylor": "loss_change", "fisher": "squared_change", "reconstruction": "reconstruction"}
    for name, kind in {**kinds, "apoz": "active", "mean_activation": "magnitude"}.items():
        function = criteria.CRITERIA[name]
        assert torch.equal(function(groups["wide"], evidence(net)), GATHERED[kind])
        assert function(groups["stem"], evidence(net)) is None
        assert function(groups["wide"], Evidence(net.get_parameter, {}, {kind: {"wide": torch.ones(3)}})) is None


def test_random_follows_from_seed_and_group(net: Net, groups: dict[str, engine.Group]) -> None:
    """Equal seeds give equal scores, other seeds and groups others; the global random state stays as it is."""
    state = torch.get_rng_state()
    score = criteria.random(groups["wide"], evidence(net), seed=1)
    assert torch.equal(score, criteria.random(groups["wide"], evidence(net), seed=1))
    assert not torch.equal(score, criteria.random(groups["wide"], evidence(net), seed=2))
    assert not torch.equal(score[:8], criteria.random(groups["stem"], evidence(net), seed=1))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", [name for name in BY_WEIGHT if name != "random"])
def test_scores_follow_the_channels(net: Net, groups: dict[str, engine.Group], name: str) -> None:
    """With the channels of a layer in another order the scores are the same ones in that order."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    other = Net()
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        for parameter in (other.wide.weight, other.wide.bias, other.wide_norm.weight, other.wide_norm.bias):
            parameter.copy_(parameter[order])
    function = criteria.CRITERIA[name]
    torch.testing.assert_close(
        function(groups["wide"], evidence(other)), function(groups["wide"], evidence(net))[order]
    )
