"""Assumptions about recorded values."""

from __future__ import annotations

import torch

from engine.observations.assumptions import Assumptions
from engine.program.graph import Value


def test_the_first_reason_and_the_weakest_claim_count() -> None:
    """Zeros stay zero only if all assumptions about a value say so."""
    value, assumptions = Value(3, (2,), torch.float32), Assumptions()
    for reason in ("first", "second"):
        assumptions.use([value], reason)
    assert assumptions.used == {3: (value, "first")}
    for zeros_stay, expected in ((True, True), (False, False), (True, False)):
        assumptions.vary([value], zeros_stay=zeros_stay)
        assert assumptions.varying == {3: (value, expected)}
