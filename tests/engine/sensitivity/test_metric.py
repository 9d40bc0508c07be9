"""The user's function that says how good a model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import InputError
from engine.sensitivity.metric import Metric


def test_numbers_of_all_kinds() -> None:
    """A tensor of one entry and a number of any type are one number; arguments are handed on."""
    assert Metric(lambda x, y: torch.tensor([x + y]), (1,), {"y": 0.5})("here") == 1.5
    assert Metric(lambda: True)("here") == 1.0


@pytest.mark.parametrize("value", [None, "0.5", torch.ones(2), float("nan")])
def test_what_is_no_number(value: Any) -> None:
    """The error says what came back, and for which model."""
    with pytest.raises(InputError, match="for layer 'a' at 0.5"):
        Metric(lambda: value)("layer 'a' at 0.5")
