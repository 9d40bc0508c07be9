"""Slices that cover a whole dimension: torch runs no op for them, although another bound would remove entries."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["covering_slices"]


def covering_slices(tensor: Tensor, index: Any, numbers: Container[Any]) -> Iterator[int]:
    """Yield the dimensions that an index covers by a slice with one of the given numbers as a bound.

    Args:
        tensor: the indexed tensor.
        index: as in ``tensor[index]``.
        numbers: numbers that may differ in another call.

    Example:
        >>> list(covering_slices(torch.zeros(2, 3, 8), (..., None, slice(None, 8)), [8]))
        [2]
        >>> list(covering_slices(torch.zeros(2, 3, 8), (..., slice(None, 7)), [7]))
        []
    """
    items = index if isinstance(index, tuple) else (index,)
    dim = 0
    for position, item in enumerate(items):
        if item is Ellipsis:
            dim = tensor.ndim - sum(map(_dims_of, items[position + 1 :]))
            continue
        if isinstance(item, slice) and any(type(n) is int and n in numbers for n in (item.start, item.stop)):
            if dim < tensor.ndim and item.indices(tensor.shape[dim]) == (0, tensor.shape[dim], 1):
                yield dim
        dim += _dims_of(item)


def _dims_of(item: Any) -> int:
    """Return the number of dimensions that an item of an index consumes."""
    if item is None or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else 1
