"""Cancellation in gradients: the scale for the error of a gradient that consists of rounding errors only.

An example is the gradient of a bias in front of a batch norm: zero up to rounding, which depends on the number of
channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["floors_by_rounding", "least_floors", "nudged"]

_SMALL = 1e-6
"""Gradients below this fraction of the largest one count as rounding, and are measured against it."""

_TIMES, _MOST = 64, 1e-3
"""Gradients may differ by this multiple of their rounding, up to this fraction of the largest gradient."""


def least_floors(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the minimum scale against which the error of each gradient is measured.

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
    """Return such scales, based on how much the last digits of the parameters change each gradient.

    Args:
        gradients: by parameter.
        others: gradients with `nudged` parameters.
        tolerance: allowed relative error.

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
    """Return a tensor with each entry replaced by the next larger number; zeros stay.

    Args:
        tensor: a floating-point tensor; any other is returned unchanged.

    Example:
        >>> (nudged(torch.tensor([0.0, 1.0])) - torch.tensor([0.0, 1.0])).tolist()
        [0.0, 1.1920928955078125e-07]
    """
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor == 0, tensor, torch.nextafter(tensor, torch.full_like(tensor, math.inf)))


def _largest(gradients: Mapping[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in gradients.values() if t.numel()), default=0.0)
