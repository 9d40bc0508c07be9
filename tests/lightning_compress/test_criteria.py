"""Tests of the criteria."""

from __future__ import annotations

import pytest
import torch

import engine
from lightning_compress import criteria
from lightning_compress.packages import MisconfigurationException
from tests.lightning_compress.models import Net, seeded


@pytest.fixture(scope="module")
def net() -> Net:
    """A network with random weights."""
    return seeded(Net)


@pytest.fixture(scope="module")
def groups(net: Net) -> dict[str, engine.Group]:
    """Its groups by name."""
    return {group.name: group for group in engine.dependency_groups(net, torch.ones(1, 3, 8, 8))}


def test_l1_sums_over_all_layers_of_the_group(net: Net, groups: dict[str, engine.Group]) -> None:
    """The residual group's score is the sum over both convolutions that put the channel out, biases and norms left
    out.
    """
    expected = net.stem.weight.abs().sum((1, 2, 3)) + net.back.weight.abs().sum((1, 2, 3))
    torch.testing.assert_close(criteria.l1(groups["stem"], net.get_parameter), expected.detach())


def test_l2_is_the_norm_over_the_group(net: Net, groups: dict[str, engine.Group]) -> None:
    """The score is the Euclidean norm of the weights of each channel."""
    expected = net.wide.weight.flatten(1).norm(dim=1)
    torch.testing.assert_close(criteria.l2(groups["wide"], net.get_parameter), expected.detach())


def test_random_follows_from_seed_and_group(net: Net, groups: dict[str, engine.Group]) -> None:
    """Equal seeds give equal scores, other seeds and groups others; the global random state stays as it is."""
    state = torch.get_rng_state()
    score = criteria.random(groups["wide"], net.get_parameter, seed=1)
    assert torch.equal(score, criteria.random(groups["wide"], net.get_parameter, seed=1))
    assert not torch.equal(score, criteria.random(groups["wide"], net.get_parameter, seed=2))
    assert not torch.equal(score[:8], criteria.random(groups["stem"], net.get_parameter, seed=1))
    assert torch.equal(state, torch.get_rng_state())


def test_resolve_takes_names_paths_and_functions() -> None:
    """A name, an import path and a function resolve; what is none of them is an error that names it."""
    assert criteria.resolve("l1") is criteria.l1
    assert criteria.resolve("lightning_compress.criteria.l2") is criteria.l2
    assert criteria.resolve(criteria.l2) is criteria.l2
    for wrong in ("l3", "no.such.module", "lightning_compress.criteria.l3", "torch."):
        with pytest.raises(MisconfigurationException, match=f"{wrong}'.*l1, l2, random"):
            criteria.resolve(wrong)


def test_bad_scores_are_errors(net: Net, groups: dict[str, engine.Group]) -> None:
    """Scores of a wrong shape and scores that are NaN are errors that name the group."""
    with pytest.raises(MisconfigurationException, match=r"shape \(3,\) for group `stem`, not \(8,\)"):
        criteria.score(lambda group, parameter: torch.ones(3), groups["stem"], net.get_parameter)
    with pytest.raises(MisconfigurationException, match="NaN.*`stem`"):
        criteria.score(lambda group, parameter: torch.full((8,), torch.nan), groups["stem"], net.get_parameter)
