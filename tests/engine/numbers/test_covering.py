"""Slices that cover a whole dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.numbers.covering import covering_slices

MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("index", "dims"),
    [
        (slice(0, 9), [0]),
        ((slice(None), slice(None, 9)), [1]),
        ((0, slice(-9, None)), [1]),
        ((MASK, slice(None, 9)), [2]),
        ((None, ..., slice(None, 9), slice(None)), [1]),
        ((slice(None, 9), slice(None, 9)), [0, 1]),
        ((slice(None, None, 2), slice(9, None)), []),
        ((slice(None), slice(None, 8)), []),
    ],
)
def test_dimensions(index: Any, dims: list[int]) -> None:
    """Whatever stands beside them."""
    assert list(covering_slices(torch.zeros(2, 3, 4), index, [9, -9])) == dims
