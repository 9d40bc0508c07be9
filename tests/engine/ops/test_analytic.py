"""Which networks are analytic functions of their input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.ops.analytic import is_analytic
from engine.tracer import trace


class Reads(nn.Module):
    """Goes another way where the mean is large."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or its double."""
        return x * 2 if x.mean() > 1 else x


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input times the number of calls."""
        self.calls += 1
        return x * self.calls


def _network(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *inner, nn.LayerNorm(6), nn.Linear(6, 2))


@pytest.mark.parametrize("inner", [nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Softmax(-1), nn.Dropout(0.5)])
def test_smooth_networks_are(inner: nn.Module) -> None:
    """Activations without pieces are analytic; dropout does nothing in eval mode."""
    assert is_analytic(trace(_network(inner), torch.zeros(2, 4)))


@pytest.mark.parametrize("inner", [nn.ReLU(), nn.Hardswish(), nn.Softplus(), Reads(), Counts()])
def test_networks_with_pieces_or_state_are_not(inner: nn.Module) -> None:
    """Pieces, choices by data, and what a call leaves to the next."""
    assert not is_analytic(trace(_network(inner), torch.zeros(2, 4)))


def test_the_ops_are_smooth() -> None:
    """None of them has a kink between two random points, or a jump: the slopes on both sides of a point are one."""
    x = torch.randn(64, dtype=torch.float64)
    for name in ("cos", "erf", "exp", "sigmoid", "sin", "square", "tanh"):
        function = getattr(torch, name)
        for point in (x, torch.zeros(1, dtype=torch.float64)):
            left = (function(point) - function(point - 1e-6)) / 1e-6
            right = (function(point + 1e-6) - function(point)) / 1e-6
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
