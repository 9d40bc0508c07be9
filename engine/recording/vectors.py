"""Vectors that code makes of buffers alone, as a frozen batch norm makes its scale of its statistics.

Ops on buffers as such are not part of the program: most make tables, whose numbers matter and whose sizes do not
follow. Where a vector with an entry per channel meets the program entry by entry, the ops that produce it are recorded
too, so that the buffers lose the entries of channels that go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.program.signature import Signature
from engine.program.trees import tensors_in
from engine.recording.opaque import storage_of
from engine.source.sites import Site

__all__ = ["Call", "Vectors"]


@dataclass(frozen=True, eq=False)
class Call:
    """A call that produces a vector.

    Attributes:
        what: the op's signature.
        func, args, kwargs: the call.
        out: the vector.
        numbers: those that the code passed.
        site: where it is.
    """

    what: Signature
    func: Any
    args: Any
    kwargs: Any
    out: Tensor
    numbers: tuple[int | float, ...]
    site: Site | None


class Vectors:
    """The vectors that a run has made of buffers.

    Args:
        names: of a model's parameters and buffers, by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._calls: dict[int, Call] = {}

    def note(self, call: Call) -> None:
        """Keep a call of which vectors of buffers alone go in, and one of as many entries comes out."""
        inputs = list(tensors_in((call.args, call.kwargs)))
        if not inputs or call.what.writes or not isinstance(call.out, Tensor) or not _is_vector(call.out):
            return
        alike = all(_is_vector(t) and t.numel() == call.out.numel() and self._is_ours(t) for t in inputs)
        moved = len(inputs) == 1 and storage_of(inputs[0]) == storage_of(call.out)
        if alike and (moved or torch.Tag.pointwise in call.func.tags):
            self._calls[id(call.out)] = call

    def _is_ours(self, tensor: Tensor) -> bool:
        return id(tensor) in self._calls or id(tensor) in self._names

    def meeting(self, func: Any, args: Any, kwargs: Any) -> Iterator[Call]:
        """Yield the calls behind the vectors that an op combines entry by entry with others, in order, once each."""
        if self._calls and torch.Tag.pointwise in func.tags:
            for tensor in tensors_in((args, kwargs)):
                yield from self._behind(tensor)

    def _behind(self, tensor: Tensor) -> Iterator[Call]:
        call = self._calls.pop(id(tensor), None)
        if call is not None:
            for other in tensors_in((call.args, call.kwargs)):
                yield from self._behind(other)
            yield call


def _is_vector(tensor: Tensor) -> bool:
    """Whether a tensor holds floating numbers along one dimension."""
    plain = tensor.is_floating_point() and tensor.layout is torch.strided
    return plain and 1 < tensor.numel() == max(tensor.shape, default=1)
