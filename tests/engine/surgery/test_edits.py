"""Numbers in the source of a function; whole networks are in ``test_pins.py``."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import engine
from engine.errors import PlanError
from engine.surgery.edits import Pin, edited, original, rebuilt, source_hash
from engine.surgery.kinds.pins import Pinned


def folded(x: Tensor) -> Tensor:
    """Return rows of six."""
    return x.reshape(-1, 6)


PIN = Pin("", "folded", "folded", source_hash(folded), 2, 27, "", 1, 3)


def test_one_number_is_replaced() -> None:
    """The function computes with the new number, and knows the one it was made of."""
    other = rebuilt(folded, [PIN], {})
    assert folded(torch.zeros(12)).shape == (2, 6) and other(torch.zeros(12)).shape == (4, 3)
    assert original(other) is folded and original(folded) is folded


@pytest.mark.parametrize("change", [{"line": 1}, {"position": 7}, {"operator": "Mult"}, {"operator": "mean"}])
def test_another_place_is_refused(change: dict[str, object]) -> None:
    """There is no such call, or it has no such argument."""
    pin = dataclasses.replace(PIN, **change)
    assert edited(folded, [PIN]) is not None and edited(folded, [pin]) is None
    with pytest.raises(PlanError, match="source of folded"):
        rebuilt(folded, [pin], {})


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**31])
def test_a_damaged_number_is_refused(value: float) -> None:
    """Sizes are finite and smaller than that."""
    with pytest.raises(PlanError, match="'folded' is damaged"):
        Pin.from_state_dict({**PIN.state_dict(), "value": value})


def test_a_pin_as_primitives() -> None:
    """There and back; what is damaged is refused with the plan."""
    pin = Pin("", "forward", "forward", "0123456789abcdef", 3, 20, "", 1, 4)
    assert Pin.from_state_dict(pin.state_dict()) == pin
    assert {type(v) for v in pin.state_dict().values()} == {str, int}
    state = engine.Plan(exchanges=(Pinned("1", (pin,)),)).state_dict()
    state["exchanges"][0]["pins"][0].pop("value")
    with pytest.raises(PlanError, match="damaged"):
        engine.Plan.from_state_dict(state)
