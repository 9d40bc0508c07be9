"""Conditions behind which code only copies a tensor, warns or logs."""

from __future__ import annotations

import ast
import logging
import warnings

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.flow.idle_conditions import _lines, places_of_idle_conditions
from engine.ops.calls import FUNCTIONS
from tests.engine.exactness import masked, randomised, relative_error, run

logger = logging.getLogger(__name__)


class Guarded(nn.Module):
    """An upsampling as in diffusers, whose memory format depends on how large its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 2, H, W)."""
        h = self.stem(x)
        if h.numel() * 2 > 2**6:
            h = h.contiguous()
        if h.shape[1] > 6:
            warnings.warn("wide", stacklevel=2)
        return self.head(h)  # type: ignore[no-any-return]


class Deciding(Guarded):
    """The same with a condition that decides what is computed."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 2, H, W)."""
        h = self.stem(x)
        if h.numel() * 2 > 2**6:
            h = h.relu()
        return self.head(h)  # type: ignore[no-any-return]


class Writing(Guarded):
    """The same with a write in place, which reaches the input of the condition only where nothing is copied."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 2, H, W)."""
        first = h = self.stem(x)
        if h.numel() * 2 > 2**6:
            h = h.clone()
        h.mul_(2.0)
        return self.head(first + h)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:wide")
@pytest.mark.parametrize(("kind", "left"), [(Guarded, 4), (Deciding, 8), (Writing, 8)])
def test_channels_in_conditions(kind: type[Guarded], left: int) -> None:
    """They go where nothing depends on the outcome, and stay where something does."""
    net, x = randomised(kind()), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    half = (torch.arange(8) % 2 == 0).double()
    masks = {"stem": {"weight": half.view(8, 1, 1, 1).expand(8, 3, 1, 1), "bias": half}}
    repaired = engine.fix_mask_conflict(masks, net, x)
    reference, small = masked(net, repaired), engine.ModelSpeedup(net, x, repaired).speedup_model()
    assert small.stem.out_channels == left
    for size in (4, 1, 9):
        other = torch.randn(1, 3, size, size, dtype=torch.float64)
        assert relative_error(run(reference, other), run(small, other)) <= 1e-9


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("if h.numel() > 5:\n  h = h.contiguous()", {1}),
        ("if (\n  h.numel() > 5\n):\n  h = h.clone()\n  print(h)", {2}),
        ("if h.numel() > 5:\n  logger.warning('large')", {1}),
        ("if h.numel() > 5:\n  raise ValueError", set()),
        ("if h.numel() > 5:\n  h = h.half()", set()),
        ("if h.numel() > 5:\n  h = y.contiguous()", set()),
        ("if h.numel() > 5:\n  h = h.contiguous()\nelse:\n  h = h * 2", set()),
        ("if (n := h.numel()) > 5:\n  h = h.contiguous()", set()),
        ("y = f(h)\nif h.numel() > 5: h = h.contiguous()", set()),
        ("if h.numel() > 5:\n  while h.shape[0] > 5: h = h.contiguous()", set()),
    ],
)
def test_lines(code: str, lines: set[int]) -> None:
    """Of conditions without an effect that stand on lines of their own."""
    assert _lines(ast.parse(code), FUNCTIONS.copying) == lines


def test_nothing_ran() -> None:
    """There are no places then."""
    assert places_of_idle_conditions([], [], FUNCTIONS) == set()
