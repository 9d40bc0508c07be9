"""Assumptions about recorded values."""

from __future__ import annotations

import torch

from engine.observations.assumptions import Assumptions
from engine.program.graph import Value


def test_the_first_reason_and_the_weakest_claim_count() -> None:
    """Zeros stay zero only if all assumptions about a value say so."""
    value, assumptions = Value(3, (2,), torch.float32, name="weight"), Assumptions()
    for reason in ("first", "second"):
        assumptions.use([value], reason)
    assert assumptions.used == {3: (value, "first")}
    for zeros_stay, expected in ((True, True), (False, False), (True, False)):
        assumptions.vary([value], zeros_stay=zeros_stay)
        assert assumptions.varying == {3: (value, expected)}


def test_what_is_used_elsewhere_varies() -> None:
    """Code that reads an activation may compute another one in its place; parameters that it reads stay the same."""
    activation, parameter = Value(0, (2,), torch.float32), Value(1, (2,), torch.float32, name="weight")
    assumptions = Assumptions()
    assumptions.use([activation, parameter], "is read elsewhere")
    assert assumptions.varying == {0: (activation, False)}


def test_pictures_may_be_resized_and_other_values_count_as_used() -> None:
    """Dimensions from the third on are positions, if there are four."""
    tokens, picture = Value(0, (2, 3, 4), torch.float32), Value(1, (2, 3, 4, 4), torch.float32)
    assumptions = Assumptions()
    assumptions.move([tokens, picture], "is resized elsewhere")
    assert assumptions.used == {0: (tokens, "is resized elsewhere")}
    assert assumptions.whole_along == {1: (picture, {2, 3})}
    assumptions.keep_along(picture, [1])
    assert assumptions.whole_along == {1: (picture, {1, 2, 3})}
    assert assumptions.varying == {0: (tokens, False), 1: (picture, True)}
