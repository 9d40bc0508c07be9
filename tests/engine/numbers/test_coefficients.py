"""Which floats in attributes somebody may set."""

from __future__ import annotations

import torch
from torch import nn

from engine.numbers.coefficients import coefficients, settable_values
from engine.numbers.sizes import Scalar
from engine.program.expressions import NumberOf


class Gate(nn.Module):
    """A gate, and what is none."""

    default = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.eps, self._own, self.steps, self.open = 0.0, 1e-5, 0.0, 0, True


def test_zero_and_one_are_gates() -> None:
    """Public floats of the user's classes, none of torch's layers."""
    assert dict(coefficients(Gate())) == {"default": 1.0, "alpha": 0.0}
    assert not dict(coefficients(nn.CELU(1.0)))


def test_what_follows_from_a_gate_is_settable() -> None:
    """Arithmetic keeps where a number is from."""
    alpha = Scalar(0.0, NumberOf("gate", "alpha", 0.0))
    numbers = settable_values([1 - alpha, 3, torch.pi])
    assert numbers == [1.0] and type(numbers[0]) is float
