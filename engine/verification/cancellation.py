"""Cancellation in gradients: what one is measured against that is nothing but what rounding leaves of a sum.

That of a bias in front of a batch norm is one: zero, but for rounding, which differs with the number of channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["floors_by_rounding", "least_floors", "nudged"]

_SMALL = 1e-6
"""Gradients below this part of the largest one are rounding, and measured against it."""

_TIMES, _MOST = 64, 1e-3
"""How many times as much as by rounding gradients may differ, at most as if they were that part of the largest one."""


def least_floors(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the least number that each gradient is measured against.

    Args:
        gradients: by parameter.

    Example:
        >>> least_floors({"weight": torch.tensor([2.0, 1.0]), "bias": torch.zeros(2)})
        {'weight': 2e-06, 'bias': 2e-06}
    """
    return dict.fromkeys(gradients, _SMALL * _largest(gradients))


def floors_by_rounding(
    gradients: Mapping[str, Tensor], others: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """Return the same, given by how much the last digits of the parameters change each gradient.

    Args:
        gradients: by parameter.
        others: those of `nudged` parameters.
        tolerance: relative error that is allowed.

    Example:
        >>> gradients, others = {"weight": torch.ones(1), "bias": torch.zeros(1)}, {"bias": torch.full([1], 2.0**-54)}
        >>> floors_by_rounding(gradients, others, 2.0**-30)
        {'weight': 1e-06, 'bias': 3.814697265625e-06}
    """
    floors = least_floors(gradients)
    for name, other in others.items():
        gap = float((gradients[name] - other).abs().max()) if other.numel() else 0.0
        floors[name] = max(floors[name], min(_TIMES * gap / tolerance, _MOST * _largest(gradients)))
    return floors


def nudged(tensor: Tensor) -> Tensor:
    """Return a tensor whose entries are the next larger numbers; zeros stay.

    Args:
        tensor: of floating-point numbers; any other is returned as it is.

    Example:
        >>> (nudged(torch.tensor([0.0, 1.0])) - torch.tensor([0.0, 1.0])).tolist()
        [0.0, 1.1920928955078125e-07]
    """
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor == 0, tensor, torch.nextafter(tensor, torch.full_like(tensor, math.inf)))


def _largest(gradients: Mapping[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in gradients.values() if t.numel()), default=0.0)
