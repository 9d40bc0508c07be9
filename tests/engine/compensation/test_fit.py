"""Ridge regression toward the present weights."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from engine.compensation.fit import correction, squared_error
from engine.errors import InputError

ROWS = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_linear_target_is_met_where_the_weight_may_change() -> None:
    """Each output has its own support; a constant goes into the shift."""
    wanted = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0]], dtype=torch.float64)
    change = correction(ROWS, ROWS @ wanted.T + 5, wanted != 0, 0.0, True, "layer")
    assert torch.allclose(change.weight, wanted) and torch.allclose(change.shift, torch.full((2,), 5.0).double())
    assert squared_error(ROWS, ROWS @ wanted.T + 5, change) <= 1e-20


def test_a_large_penalty_changes_nothing() -> None:
    """Toward the weights as they are."""
    change = correction(ROWS, ROWS @ torch.ones(4, 1).double(), torch.ones(1, 4) > 0, 1e12, False, "layer")
    assert float(change.weight.abs().max()) < 1e-9 and float(change.shift) == 0


def test_without_a_unique_solution_the_layer_is_named() -> None:
    """Two equal columns and no penalty."""
    rows = ROWS[:, [0, 0]]
    with pytest.raises(InputError, match="'layer'.*no unique solution.*`ridge` > 0"):
        correction(rows.round(), ROWS[:, :1], torch.ones(1, 2) > 0, 0.0, False, "layer")


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_inputs_that_do_not_vary_leave_the_weights(value: float) -> None:
    """Dead channels on all samples, and constants whose mean is off by a rounding; the shift takes up the target."""
    rows = torch.full((7, 4), value, dtype=torch.float64)
    change = correction(rows, ROWS[:7, :1] + 3, torch.ones(1, 4) > 0, 1e-3, True, "layer")
    assert float(change.weight.abs().max()) <= 1e-6 and torch.allclose(change.shift, (ROWS[:7, :1] + 3).mean(0))


def test_fewer_rows_than_columns() -> None:
    """The change is the same as with one equation per column, which several processes solve."""
    rows, residual = torch.cat([ROWS, ROWS.roll(3, 0), ROWS.square()], 1)[:9], ROWS[:9, :2]
    support = torch.ones(2, 12) > 0
    support[1, 4:7] = False
    few = correction(rows, residual, support, 1e-3, True, "layer")
    many = correction(rows, residual, support, 1e-3, True, "layer", mock.Mock(summed=lambda tensor: tensor))
    assert torch.allclose(few.weight, many.weight, rtol=1e-9) and torch.allclose(few.shift, many.shift, rtol=1e-9)
    with pytest.raises(InputError, match="'layer'.*12 inputs.*no unique solution|no unique solution.*12 inputs"):
        correction(rows, residual, support[:1], 0.0, True, "layer")


def test_no_matrix_is_larger_than_the_rows_need() -> None:
    """The first linear layer of a VGG has 25,088 inputs, and their Gram matrix 5 GB; a few samples need none of it."""
    rows = torch.randn(6, 1 << 17, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    change = correction(rows, rows[:, :1], torch.ones(1, 1 << 17) > 0, 1e-6, False, "layer")  # 137 GB otherwise
    assert squared_error(rows, rows[:, :1], change) <= 1e-9 * float(rows[:, :1].square().sum())
