"""Gradients that are nothing but rounding."""

from __future__ import annotations

import torch

from engine.verification.cancellation import floors_by_rounding, least_floors, nudged


def test_a_floor_is_a_small_part_of_the_largest_gradient() -> None:
    """Of all gradients, empty ones too; none where there are none."""
    gradients = {"weight": torch.tensor([3.0, -4.0]), "bias": torch.zeros(0)}
    assert least_floors(gradients) == {"weight": 4e-6, "bias": 4e-6} and not least_floors({})


def test_floors_rise_with_rounding_up_to_a_limit() -> None:
    """A gradient that last digits change much is no rounding: a condition comes out otherwise, say."""
    gradients = {name: torch.ones(2) for name in ("still", "rounded", "jumps")}
    others = {"still": torch.ones(2), "rounded": torch.ones(2) + 1e-6, "jumps": torch.zeros(2)}
    floors = floors_by_rounding({n: g.double() for n, g in gradients.items()}, others, 1e-1)
    assert floors["still"] == 1e-6 and 6e-4 < floors["rounded"] < 7e-4 and floors["jumps"] == 1e-3


def test_last_digits() -> None:
    """The next number, of any sign; zeros stay zero, and whole numbers as they are."""
    x = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert (nudged(x) - x).tolist() == [0.0, 2**-52, 2**-53] and nudged(torch.arange(3)).tolist() == [0, 1, 2]
