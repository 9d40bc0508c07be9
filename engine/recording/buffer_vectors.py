"""Vectors that code computes from buffers alone, as a frozen batch norm computes its scale from its statistics.

Ops on buffers are usually not part of the program: most compute tables, of which only the numbers matter, and not the
sizes. If an elementwise op combines a vector of buffers with an activation, the ops that compute the vector are
recorded as well, so that the buffers lose the entries of removed channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.program.signature import Signature
from engine.program.storages import storage_of
from engine.program.trees import tensors_in
from engine.source.sites import Site

__all__ = ["VectorCall", "BufferVectors"]


@dataclass(frozen=True, eq=False)
class VectorCall:
    """A call that computes a vector.

    Attributes:
        signature: of the op.
        func, args, kwargs: the call.
        out: the vector.
        numbers: numbers that the code passed.
        site: place of the call.
    """

    signature: Signature
    func: Any
    args: Any
    kwargs: Any
    out: Tensor
    numbers: tuple[int | float, ...]
    site: Site | None


class BufferVectors:
    """The vectors that a run computes from buffers.

    Args:
        names: names of a model's parameters and buffers by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._calls: dict[int, VectorCall] = {}

    def add(self, call: VectorCall) -> None:
        """Keep a call that computes a vector from vectors of buffers with the same number of entries."""
        inputs = list(tensors_in((call.args, call.kwargs)))
        if not inputs or call.signature.writes or not isinstance(call.out, Tensor) or not _is_vector(call.out):
            return
        of_same_size = all(
            _is_vector(t) and t.numel() == call.out.numel() and self._is_vector_of_buffers(t) for t in inputs
        )
        is_view = len(inputs) == 1 and storage_of(inputs[0]) == storage_of(call.out)
        if of_same_size and (is_view or torch.Tag.pointwise in call.func.tags):
            self._calls[id(call.out)] = call

    def _is_vector_of_buffers(self, tensor: Tensor) -> bool:
        return id(tensor) in self._calls or id(tensor) in self._names

    def needed_for(self, func: Any, args: Any, kwargs: Any) -> Iterator[VectorCall]:
        """Yield the calls that compute the vectors among the inputs of an elementwise op, each once, in order."""
        if self._calls and torch.Tag.pointwise in func.tags:
            for tensor in tensors_in((args, kwargs)):
                yield from self._calls_behind(tensor)

    def _calls_behind(self, tensor: Tensor) -> Iterator[VectorCall]:
        call = self._calls.pop(id(tensor), None)
        if call is not None:
            for other in tensors_in((call.args, call.kwargs)):
                yield from self._calls_behind(other)
            yield call


def _is_vector(tensor: Tensor) -> bool:
    """Whether a floating-point tensor has entries along a single dimension only."""
    plain = tensor.is_floating_point() and tensor.layout is torch.strided
    return plain and 1 < tensor.numel() == max(tensor.shape, default=1)
