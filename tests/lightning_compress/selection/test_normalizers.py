"""Tests of what makes scores comparable."""

from __future__ import annotations

import pytest
import torch

import engine
from lightning_compress.selection import criteria, scoring
from lightning_compress.selection.normalizers import NORMALIZERS, lamp_scores
from tests.lightning_compress.models import Net
from tests.lightning_compress.selection.test_criteria import evidence, groups, net

__all__ = ["groups", "net"]  # fixtures


@pytest.mark.parametrize("by", sorted(NORMALIZERS))
def test_normalising_keeps_the_order(net: Net, groups: dict[str, engine.Group], by: str) -> None:
    """Within a group each normalisation is monotone, and finite where all scores are equal or zero."""
    raw, found = (f(groups["wide"], evidence(net)) for f in (criteria.l2, scoring.normalized(criteria.l2, by)))
    assert torch.equal(raw.argsort(), found.argsort())
    for constant in (0.0, 3.0):
        flat = scoring.normalized(lambda g, e, c=constant: torch.full((g.size,), c), by)
        assert torch.isfinite(flat(groups["wide"], evidence(net))).all()


def test_mean_of_what_is_left_is_one(net: Net, groups: dict[str, engine.Group]) -> None:
    """Masked channels do not lower the mean of a group, so that it does not look stronger the more it has lost."""
    kept = torch.arange(16) > 5
    found = scoring.normalized(criteria.l1, "mean")(groups["wide"], evidence(net, kept))
    torch.testing.assert_close(found[kept].mean(), torch.tensor(1.0))
    assert not found[~kept].any()


def test_values() -> None:
    """Each against its formula, on numbers that are known."""
    scores = torch.tensor([1.0, -3.0, 2.0])
    expected = {
        "max": [1 / 3, -1, 2 / 3],
        "mean": [0.5, -1.5, 1],
        "none": [1, -3, 2],
        "norm": [1 / 14**0.5, -3 / 14**0.5, 2 / 14**0.5],
        "rank": [1 / 3, 0, 2 / 3],
        "sum": [1 / 6, -0.5, 1 / 3],
    }
    for name, values in expected.items():
        torch.testing.assert_close(NORMALIZERS[name](scores), torch.tensor(values, dtype=torch.float32))
    standard = NORMALIZERS["standard"](scores)
    torch.testing.assert_close(torch.stack([standard.mean(), standard.std(correction=0)]), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(lamp_scores(torch.tensor([1.0, 3.0, 4.0])), torch.tensor([1 / 8, 3 / 7, 1.0]))
