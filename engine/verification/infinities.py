"""Infinite entries of compared tensors, as in masks for causal attention or for invalid actions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["without_infinities"]


def without_infinities(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finite entries of two tensors, if some entries are infinite, the same ones in both, and not all.

    Otherwise the tensors are returned unchanged, so that the caller sees infinities that differ, complete overflow, and
    NaN.

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
