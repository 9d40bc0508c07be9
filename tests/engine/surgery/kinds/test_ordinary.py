"""RMS norms that become ordinary ones."""

from __future__ import annotations

import pytest
from torch import nn

import engine
from engine.errors import PlanError
from engine.surgery.kinds import exchanges_from, state_of
from engine.surgery.kinds.ordinary import OrdinaryNorm
from tests.engine.language import RootMeanSquare

NORM = OrdinaryNorm("1", 8, 2, "eps", 0.5)


def network() -> nn.Module:
    """A norm of two channels between layers."""
    return nn.Sequential(nn.Linear(3, 2), RootMeanSquare(2), nn.Linear(2, 3))


def test_it_is_stored_and_loaded() -> None:
    """As primitives, with nothing of the weights."""
    (again,) = exchanges_from([state_of(NORM)])
    assert isinstance(again, OrdinaryNorm) and state_of(again) == state_of(NORM)
    assert "ordinary norm over 2 of 8 channels" in str(again) and not again.exact_in_train


@pytest.mark.parametrize("change", [{"kept": 9}, {"squares": -1.0}, {"squares": float("inf")}, {"offset": 0.5}])
def test_numbers_of_a_damaged_file_are_refused(change: dict[str, float]) -> None:
    """They would be another function."""
    with pytest.raises(PlanError, match="damaged"):
        engine.Plan.from_state_dict(
            {**engine.Plan(exchanges=(NORM,)).state_dict(), "exchanges": [state_of(NORM) | change]}
        )


def test_eps_follows_from_the_module() -> None:
    """It is not taken from a file; the weight gets the other scale."""
    model = network()
    engine.Plan(exchanges=(NORM,)).apply(model)
    assert model[1].eps == pytest.approx((1e-5 + 0.5 / 8) * 4) and model[1].weight.tolist() == [2.0, 2.0]


def test_a_module_without_such_a_number_is_refused() -> None:
    """Nothing changes."""
    model = network()
    with pytest.raises(PlanError, match=r"'0' \(Linear\) has no eps"):
        engine.Plan(exchanges=(NORM.renamed("0"),)).apply(model)


def test_two_in_a_row_are_one() -> None:
    """Over the channels that both lost."""
    both = OrdinaryNorm("1", 8, 4, "eps", 0.5).then(OrdinaryNorm("1", 4, 2, "eps", 0.25))
    assert (both.size, both.kept, both.squares) == (8, 2, 0.75)


def test_it_is_undone() -> None:
    """A change that is rolled back leaves the same tensors."""
    model = network()
    weight = model[1].weight.data_ptr()
    change = engine.Plan(exchanges=(NORM,)).prepare(model)
    change.commit()
    change.rollback()
    assert model[1].eps == 1e-5 and model[1].weight.data_ptr() == weight and model[1].weight.tolist() == [1.0, 1.0]
