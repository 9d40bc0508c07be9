"""What functions of torch do, by the names that code calls them by."""

from __future__ import annotations

import torch

from engine.flow.effects import Effect
from engine.ops.calls import FUNCTIONS


def test_a_zero_stays_one() -> None:
    """Where the table says so, and changes where it does not; tried on zeros."""
    zeros, arguments = torch.zeros(3), {"mul": 2.0, "div": 2.0, "true_divide": 2.0}
    tried = 0
    for name in FUNCTIONS.keeps_zero:
        function = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
        if function is not None and not name.startswith(("dropout", "feature")):
            assert function(zeros, *[arguments[n] for n in [name] if n in arguments]).eq(0).all(), name
            tried += 1
    assert tried > 10


def test_levels() -> None:
    """By name; what is not listed is not known."""
    assert FUNCTIONS.of_call("clone") is Effect.KEEPS and FUNCTIONS.of_call("relu") is Effect.KEEPS_ZERO
    assert FUNCTIONS.of_call("add") is Effect.CHANGES and FUNCTIONS.of_call("cumsum") is None
    assert "zeros_like" in FUNCTIONS.filling and "empty" not in FUNCTIONS.filling
