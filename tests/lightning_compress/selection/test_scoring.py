"""Criteria that are found, normalised and combined."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from lightning_compress.selection import criteria, scoring
from lightning_compress.selection.evidence import Evidence
from lightning_compress.selection.normalizers import NORMALIZERS
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net
from tests.lightning_compress.selection.test_criteria import evidence, groups, net

__all__ = ["groups", "net"]


def test_criteria_combine(net: Net, groups: dict[str, engine.Group]) -> None:
    """Several names are normalised and summed, with factors if given; a product multiplies; None stays None."""
    one, two = (
        scoring.normalized(criteria.CRITERIA[n], "max")(groups["wide"], evidence(net)) for n in ("l1", "taylor")
    )
    both = scoring.resolve({"l1": 2.0, "taylor": 0.5}, normalize="max")
    assert criteria.needs(both) == {"loss_change"}
    torch.testing.assert_close(both(groups["wide"], evidence(net)), 2.0 * one.double() + 0.5 * two.double())
    assert both(groups["stem"], evidence(net)) is None
    product = scoring.product(criteria.l1, criteria.l2)(groups["wide"], evidence(net))
    expected = criteria.l1(groups["wide"], evidence(net)) * criteria.l2(groups["wide"], evidence(net))
    torch.testing.assert_close(product, expected.double())


@pytest.mark.parametrize(
    "spec", [*criteria.CRITERIA, ("l1", "taylor"), {"l2": 2.0, "random": 0.5}], ids=lambda spec: str(spec)
)
@pytest.mark.parametrize("by", [None, *NORMALIZERS])
def test_travels_to_other_processes(net: Net, groups: dict[str, engine.Group], spec: Any, by: str | None) -> None:
    """Strategies that spawn processes pickle the callbacks, and so their criteria."""
    criterion = scoring.resolve(spec, normalize=by)
    other = pickle.loads(pickle.dumps(criterion))
    assert criteria.needs(other) == criteria.needs(criterion)
    assert torch.equal(other(groups["wide"], evidence(net)), criterion(groups["wide"], evidence(net)))


def test_a_product_travels_too(net: Net, groups: dict[str, engine.Group]) -> None:
    """The same of what is multiplied."""
    criterion = scoring.product(criteria.l1, criteria.taylor)
    other = pickle.loads(pickle.dumps(criterion))
    assert torch.equal(other(groups["wide"], evidence(net)), criterion(groups["wide"], evidence(net)))


def by_position(group: engine.Group, evidence: Evidence) -> Tensor:
    """A criterion of a user."""
    return torch.arange(float(group.size))


def test_resolve_takes_names_paths_and_functions(net: Net, groups: dict[str, engine.Group]) -> None:
    """A name, an import path and a function resolve; what is none of them is an error that names it."""
    for spec in (f"{__name__}:by_position", f"{__name__}.by_position", by_position):
        found = scoring.resolve(spec)(groups["wide"], evidence(net))
        assert torch.equal(found, torch.arange(16.0))
    for wrong in ("l3", "no.such:module", "lightning_compress.selection.criteria.l3", "torch."):
        with pytest.raises(MisconfigurationException, match=f"{wrong}'.*apoz, bn_scale"):
            scoring.resolve(wrong)
    for wrong in ({}, [], {"l1": "much"}):
        with pytest.raises(MisconfigurationException, match="names with factors"):
            scoring.resolve(wrong)
    with pytest.raises(MisconfigurationException, match="`normalize='median'`.*lamp, max"):
        scoring.resolve("l1", normalize="median")


@pytest.mark.parametrize("wrong", [[["l1"]], {"l1": float("nan")}, {"l1": True}, [], torch.tensor(1.0)])
def test_what_holds_no_names(wrong: Any) -> None:
    """A list of lists, a factor that is no number, and a tensor that is one."""
    with pytest.raises(MisconfigurationException, match="`criterion` must hold names, or names with factors"):
        scoring.resolve(wrong)


def test_bad_scores_are_errors(net: Net, groups: dict[str, engine.Group]) -> None:
    """Scores of a wrong shape and scores that are NaN are errors that name the group."""
    with pytest.raises(MisconfigurationException, match=r"shape \(3,\) for group `stem`, not \(8,\)"):
        scoring.score(lambda group, parameter: torch.ones(3), groups["stem"], evidence(net))
    with pytest.raises(MisconfigurationException, match="NaN.*`stem`"):
        scoring.score(lambda group, parameter: torch.full((8,), torch.nan), groups["stem"], evidence(net))
