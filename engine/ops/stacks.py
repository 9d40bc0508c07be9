"""Weights read through views: transposed (``self.weight.T``), or one of a stack (``self.experts[index]``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.ops.indexing import place_of
from engine.ops.shape import SAME, TURNED, call_on
from engine.ops.slicing import ONE
from engine.program.graph import Origin, Value

__all__ = ["Matrix", "indices_of", "matrix_of"]

Dims = tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A stored matrix, or stack of matrices, as an op reads it.

    Attributes:
        weight: the stored value.
        dims: for each dimension that the op sees, that of the stored value, or None for one of an index.
    """

    weight: Value
    dims: Dims

    @property
    def stacked(self) -> int:
        """Number of stack dimensions of the stored value."""
        return self.weight.ndim - 2

    @property
    def first(self) -> bool | None:
        """Whether the op sees the stored rows as rows; None for a part of a matrix."""
        here = self.dims[-2:]
        if set(here) != {self.stacked, self.stacked + 1}:
            return None
        return here[0] == self.stacked


def matrix_of(value: Value) -> Matrix | None:
    """Return the stored matrix, or part of a stored stack, that an op reads as its weight; None if it reads neither.

    Args:
        value: an argument of the op.
    """
    weight, chain = value, []
    while weight.origin is not None:
        chain.append(weight.origin)
        weight = weight.origin.inputs[0]
    dims: Dims | None = tuple(range(weight.ndim))
    for origin in reversed(chain):
        dims = None if dims is None else _moved(origin, dims)
    if dims is None or not weight.stored or value.ndim < 2 or weight.ndim < 2:
        return None
    return Matrix(weight, dims)


def indices_of(value: Value) -> list[Value]:
    """Return the values that select a part of a stored weight, or the value itself if it is not a view of one.

    Args:
        value: an argument of an op. Parts of a stored weight are not marked as used; nothing is removed because of it.
    """
    if value.origin is None:
        return [] if value.stored else [value]
    first, *others = value.origin.inputs
    return [*indices_of(first), *(index for other in others for index in indices_of(other))]


def _moved(origin: Origin, dims: Dims) -> Dims | None:
    """Return the dimensions after one more view; None for any other call."""
    if origin.op in SAME:
        return dims
    if origin.op in TURNED:  # with sizes that identify dimensions
        sizes = torch.empty(tuple(range(2, 2 + len(dims))), device="meta")
        return tuple(dims[n - 2] for n in call_on(origin, sizes).shape)
    if origin.op in ONE:
        place = origin.args["dim"] % len(dims)
        return dims[:place] + dims[place + 1 :]
    place = place_of(origin) if origin.op in ("index", "index_select") else None
    if place is None or len(place.dims) > 1:
        return None
    dim = place.start
    return dims[:dim] + (None,) * place.rank + dims[dim + 1 :]
