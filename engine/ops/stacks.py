"""Weights that are read by way of a view: turned (``self.weight.T``), or one of a stack (``self.experts[index]``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.ops.indexing import picked
from engine.ops.shape import SAME, TURNED, call_on
from engine.ops.slicing import ONE
from engine.program.graph import Origin, Value

__all__ = ["Matrix", "indices_of", "matrix_of"]

Dims = tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A stored matrix, or stack of them, as an op gets it.

    Attributes:
        weight: the stored value.
        dims: for each dimension of what the op gets, that of the stored value, or None for one of an index.
    """

    weight: Value
    dims: Dims

    @property
    def stacked(self) -> int:
        """Number of dimensions of the stored value in front of its matrices."""
        return self.weight.ndim - 2

    @property
    def first(self) -> bool | None:
        """Whether the rows of the matrix that the op gets are those that are stored; None for a part of a matrix."""
        here = self.dims[-2:]
        if set(here) != {self.stacked, self.stacked + 1}:
            return None
        return here[0] == self.stacked


def matrix_of(value: Value) -> Matrix | None:
    """Return what an op gets as a weight as a matrix that is stored, or picked from a stored stack; or None.

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
    """Return what picks a part of a stored weight, or the value itself where that is no view of one.

    Args:
        value: an argument of an op; no part of a stored weight is said to be used, as none is removed for that.
    """
    if value.origin is None:
        return [] if value.stored else [value]
    first, *others = value.origin.inputs
    return [*indices_of(first), *(found for other in others for found in indices_of(other))]


def _moved(origin: Origin, dims: Dims) -> Dims | None:
    """Return the dimensions behind one more call; None where it does something else."""
    if origin.op in SAME:
        return dims
    if origin.op in TURNED:  # on sizes that tell dimensions apart
        sizes = torch.empty(tuple(range(2, 2 + len(dims))), device="meta")
        return tuple(dims[n - 2] for n in call_on(origin, sizes).shape)
    if origin.op in ONE:
        place = origin.args["dim"] % len(dims)
        return dims[:place] + dims[place + 1 :]
    found = picked(origin) if origin.op in ("index", "index_select") else None
    return None if found is None else dims[: found[0]] + (None,) * found[1] + dims[found[0] + 1 :]
