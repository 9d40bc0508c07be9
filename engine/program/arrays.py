"""Compact arrays: tensors with the rank of a value, but of size 1 along every dimension that they do not depend on.

Slot labels, constants and use are all stored in this form, so that shape ops can be run on them directly.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "align",
    "along",
    "any_over",
    "compact",
    "is_finite",
    "plain",
    "reduce_to",
    "same_entries",
    "support",
    "uniform",
    "view_array",
    "zero_where",
]


def support(array: Tensor) -> tuple[int, ...]:
    """Return the dimensions that an array depends on.

    Example:
        >>> support(torch.zeros(1, 8, 1, 1))
        (1,)
    """
    return _larger_than_one(array.shape)


@functools.lru_cache(maxsize=4096)
def _larger_than_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([d for d, n in enumerate(shape) if n > 1])


def compact(array: Tensor) -> Tensor:
    """Shrink to size 1 every dimension along which all entries are equal (NaN equals NaN).

    Example:
        >>> compact(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
        tensor([[1., 2.]])
    """
    shrunk_array = whole = array.numpy()
    for dim in support(array):
        first = shrunk_array[(slice(None),) * dim + (slice(0, 1),)]
        if _alike(shrunk_array, first, dim):
            shrunk_array = first
    return array if shrunk_array is whole else torch.from_numpy(shrunk_array)


def _alike(array: npt.NDArray[Any], first: npt.NDArray[Any], dim: int) -> bool:
    """Whether all slices along a dimension are equal; comparing two entries often suffices to see that they are not."""
    if not array.size:
        return True
    one, other = array.item(0), array[(0,) * dim + (-1,) + (0,) * (array.ndim - dim - 1)].item()
    if one != other and (one == one or other == other):
        return False
    if first.size == 1:
        return bool((np.isnan(array) if one != one else array == one).all())
    same = array == first
    if array.dtype.kind == "f":
        same |= np.isnan(array) & np.isnan(first)
    return bool(same.all())


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite; assumed to be true for meta tensors.

    A sum reads the memory once and allocates nothing.

    Example:
        >>> is_finite(torch.ones(3)), is_finite(torch.tensor([1.0, float("inf"), float("-inf")]))
        (True, False)
    """
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 16:
        tensor = tensor.float()  # no arithmetic in these dtypes
    return cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())  # a sum may overflow


def align(array: Tensor, ndim: int) -> Tensor:
    """Prepend dimensions of size 1, as broadcasting does."""
    return array if array.ndim == ndim else array.reshape([1] * (ndim - array.ndim) + list(array.shape))


def along(array: Tensor, dim: int, size: int) -> Tensor:
    """Return the entries along one dimension, shape ``(size,)``; NaN where they differ over the other dimensions.

    Example:
        >>> along(torch.tensor([[[1.0, 1.0], [2.0, 3.0]]]), dim=1, size=2)
        tensor([1., nan])
    """
    if array.numel() == 1:
        return array.reshape(1).expand(size)
    if array.size(dim) == array.numel():
        return array.reshape(-1)
    rows = array.movedim(dim, 0).reshape(array.size(dim), -1)
    entries = rows[:, 0].clone()
    if rows.size(1) > 1:
        entries[(rows != rows[:, :1]).any(1)] = math.nan
    return entries.expand(size)


def any_over(array: Tensor, dims: Iterable[int]) -> Tensor:
    """OR a bool array over some of its dimensions, keeping them with size 1."""
    for dim in dims:
        if array.size(dim) > 1:
            array = array.any(dim, keepdim=True)
    return array


def reduce_to(array: Tensor, shape: Sequence[int]) -> Tensor:
    """OR a bool array down to a compact shape of the same or a lower rank."""
    while array.ndim > len(shape):
        array = array.any(0)
    for dim, size in enumerate(shape):
        if size == 1 and array.size(dim) != 1:  # an empty dimension has no entry that is used
            array = array.any(dim, keepdim=True)
    return array


@functools.lru_cache(maxsize=4096)
def _view_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[range, range]]:
    """Pair the smallest runs of old and new dimensions with equally many elements."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        if i == len(old):
            while j < len(new) and new[j] == 1:
                j += 1
        if j == len(new):
            while i < len(old) and old[i] == 1:
                i += 1
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def view_array(array: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Apply a view from shape ``old`` to shape ``new`` to a compact array.

    Example:
        >>> view_array(torch.arange(4).view(1, 4, 1), (9, 4, 2), (9, 2, 2, 2)).flatten().tolist()
        [0, 1, 2, 3]
        >>> view_array(torch.arange(4).view(1, 4, 1), (9, 4, 2), (9, 8)).flatten().tolist()
        [0, 0, 1, 1, 2, 2, 3, 3]
    """
    source, target = list(array.shape), [1] * len(new)
    if 0 in old:  # an empty tensor does not show where entries would go
        return array.new_full(target, math.nan if array.is_floating_point() else 0)
    for left, right in _view_groups(tuple(old), tuple(new)):
        if any(array.size(d) > 1 for d in left):
            for d in left:
                source[d] = old[d]
            for d in right:
                target[d] = new[d]
    return array.expand(source).reshape(target)


def uniform(array: Tensor, dims: Iterable[int]) -> Tensor:
    """Reduce to one entry along ``dims``; NaN where entries differ along them.

    Example:
        >>> uniform(torch.tensor([[1.0, 1.0], [1.0, 2.0]]), [1])
        tensor([[1.],
                [nan]])
    """
    for dim in dims:
        if array.size(dim) > 1:
            first = array.narrow(dim, 0, 1)
            array = torch.where((array == first).all(dim, keepdim=True), first, math.nan)
    return array


def plain(tensor: Tensor) -> Tensor:
    """Return the entries of a quantised or sparse tensor as an ordinary one; others as they are.

    Example:
        >>> plain(torch.eye(2).to_sparse()).layout
        torch.strided
    """
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def same_entries(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same entries, NaN included, whatever their layout is.

    Example:
        >>> holes = torch.tensor([1.0, float("nan")])
        >>> same_entries(holes, holes.clone()), same_entries(torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse())
        (True, False)
    """
    one, other = plain(one), plain(other)
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def zero_where(zero: Tensor) -> Tensor:
    """Return constants of which only the zeros are known: 0 there, and NaN where the value varies.

    Args:
        zero: bool, where the value is zero.

    Example:
        >>> zero_where(torch.tensor([True, False]))
        tensor([0., nan], dtype=torch.float64)
    """
    return torch.where(zero, 0.0, math.nan).double()
