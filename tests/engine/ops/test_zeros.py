"""Products and convolutions without what is zero are those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import zeros
from engine.running.recomputed import RecomputedTensor

ATEN = torch.ops.aten


def random(*shape: int) -> Tensor:
    """Return noise in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def half(tensor: Tensor, *dims: int) -> Tensor:
    """Return a copy that is zero in each second entry along some dimensions."""
    tensor = tensor.clone()
    for dim in dims:
        tensor.index_fill_(dim, torch.arange(0, tensor.size(dim), 2), 0.0)
    return tensor


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(zeros, "_LARGE", 1)
    monkeypatch.setattr(zeros, "_REPEATED", 0)


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "linear": (ATEN.linear.default, (half(random(2, 5, 8), 2), half(random(6, 8), 0, 1), random(6))),
    "linear, no bias": (ATEN.linear.default, (random(5, 8), half(random(6, 8), 0))),
    "linear, inputs": (ATEN.linear.default, (half(random(5, 8), 1), random(6, 8), random(6))),
    "addmm": (ATEN.addmm.default, (random(6), half(random(5, 8), 1), random(6, 8).t())),
    "mm": (ATEN.mm.default, (half(random(5, 8), 0).t(), random(5, 3))),
    "conv2d": (
        ATEN.conv2d.default,
        (half(random(2, 4, 7, 7), 1), half(random(6, 4, 3, 3), 0), random(6), [2, 2], [1, 1]),
    ),
    "conv1d": (ATEN.conv1d.default, (random(2, 4, 9), half(random(6, 4, 3), 0))),
    "pointwise": (ATEN.conv2d.default, (random(2, 4, 3, 3), half(random(6, 4, 1, 1), 1), random(6))),
    "depthwise": (
        ATEN.conv2d.default,
        (random(2, 4, 7, 7), half(random(4, 1, 3, 3), 0), random(4), [1, 1], [1, 1], [1, 1], 4),
    ),
    "depthwise, inputs": (
        ATEN.conv2d.default,
        (half(random(2, 4, 7, 7), 1), random(4, 1, 3, 3), random(4), [1, 1], [1, 1], [1, 1], 4),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_torchs(name: str) -> None:
    """Whatever is left out, the numbers are those of the op."""
    func, args = CALLS[name]
    output = zeros.in_float64(func, args, {})
    assert output is not None
    torch.testing.assert_close(output, func(*args), rtol=1e-12, atol=1e-12)


def test_weights_that_are_made_when_they_are_read() -> None:
    """A stand-in is looked into as a weight is, unless it has no parts."""
    x, weight = random(5, 8), half(random(6, 8), 0)

    def part(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return weight[first][:, second]

    def stand_in(part: Any) -> torch.Tensor:
        return RecomputedTensor(weight.float(), torch.float64, lambda: weight.clone(), part=part)

    output = zeros.in_float64(ATEN.linear.default, (x, stand_in(part)), {})
    assert output is not None
    torch.testing.assert_close(output, F.linear(x, weight))
    assert zeros.in_float64(ATEN.linear.default, (x, stand_in(None)), {}) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_zero_times_what_is_not_finite_is_not_zero(number: float) -> None:
    """Where anything is infinite or undefined, torch computes all of it."""
    x, weight = half(random(5, 8), 1), random(6, 8)
    weight[1, 0] = number
    assert zeros.in_float64(ATEN.linear.default, (x, weight), {}) is None
    pictures, kernel = half(random(2, 4, 7, 7), 1), random(6, 4, 3, 3)
    kernel[1, 0, 0, 0] = number
    assert zeros.in_float64(ATEN.conv2d.default, (pictures, kernel), {}) is None


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.linear.default, (random(5, 8), random(6, 8))),
        (ATEN.linear.default, (random(5, 8).float(), half(random(6, 8), 0).float())),
        (ATEN.addmm.default, (random(5, 6), half(random(5, 8), 1).float(), random(8, 6).float())),
        (ATEN.conv2d.default, (random(2, 4, 7, 7), half(random(6, 2, 3, 3), 0), None, [1, 1], [0, 0], [1, 1], 2)),
        (ATEN.relu.default, (random(5, 8),)),
    ],
)
def test_everything_else_is_left_to_torch(func: Any, args: tuple[Any, ...]) -> None:
    """Nothing that is zero, another dtype, groups, and other ops."""
    assert zeros.in_float64(func, args, {}) is None


def test_small_ones_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for zeros does not pay there."""
    monkeypatch.setattr(zeros, "_LARGE", 2**22)
    assert zeros.in_float64(ATEN.mm.default, (random(5, 8), half(random(8, 3), 0)), {}) is None


def test_a_few_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look through a large weight takes longer than to multiply a few rows by it."""
    monkeypatch.setattr(zeros, "_REPEATED", 4)
    weight = half(random(64, 64), 0)
    assert zeros.in_float64(ATEN.linear.default, (random(2, 64), weight), {}) is None
    assert zeros.in_float64(ATEN.linear.default, (random(64, 64), weight), {}) is not None
