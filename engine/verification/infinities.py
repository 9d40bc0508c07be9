"""Infinite entries of what is compared: those of a mask, as of causal attention or of actions that are not allowed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["without_infinities"]


def without_infinities(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the other entries of two tensors, if some entries are infinite, the same ones in both, and not all.

    Infinities hold against nothing, so that what overflows everywhere, and NaN anywhere, is left for the caller to see.

    Args:
        one, other: of one shape.

    Example:
        >>> mask = torch.tensor([0.0, -torch.inf])
        >>> without_infinities(mask, mask)
        (tensor([0.]), tensor([0.]))
        >>> without_infinities(mask, -mask)
        (tensor([0., -inf]), tensor([-0., inf]))
    """
    places = one.isinf()
    if not bool(places.any()) or bool(places.all()) or not torch.equal(one[places], other[places]):
        return one, other
    return one[~places], other[~places]
