"""Vectors that code makes of buffers alone, as a frozen batch norm makes its scale of its statistics.

Ops on buffers are no part of the program as such: most make tables, whose numbers matter and whose sizes do not follow.
Where a vector with an entry per channel meets the program entry by entry, the ops that made it are recorded after all,
so that the buffers lose the entries of channels that go.
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

__all__ = ["Made", "Vectors"]


@dataclass(frozen=True, eq=False)
class Made:
    """A call that made a vector.

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
        self._made: dict[int, Made] = {}

    def note(self, made: Made) -> None:
        """Keep a call of which vectors of buffers alone go in, and one of as many entries comes out."""
        inputs = list(tensors_in((made.args, made.kwargs)))
        if not inputs or made.what.writes or not isinstance(made.out, Tensor) or not _is_vector(made.out):
            return
        alike = all(_is_vector(t) and t.numel() == made.out.numel() and self._is_ours(t) for t in inputs)
        moved = len(inputs) == 1 and storage_of(inputs[0]) == storage_of(made.out)
        if alike and (moved or torch.Tag.pointwise in made.func.tags):
            self._made[id(made.out)] = made

    def _is_ours(self, tensor: Tensor) -> bool:
        return id(tensor) in self._made or id(tensor) in self._names

    def meeting(self, func: Any, args: Any, kwargs: Any) -> Iterator[Made]:
        """Yield the calls behind the vectors that an op combines entry by entry with others, in order, once each."""
        if self._made and torch.Tag.pointwise in func.tags:
            for tensor in tensors_in((args, kwargs)):
                yield from self._behind(tensor)

    def _behind(self, tensor: Tensor) -> Iterator[Made]:
        made = self._made.pop(id(tensor), None)
        if made is not None:
            for other in tensors_in((made.args, made.kwargs)):
                yield from self._behind(other)
            yield made


def _is_vector(tensor: Tensor) -> bool:
    """Whether a tensor holds floating numbers along one dimension."""
    plain = tensor.is_floating_point() and tensor.layout is torch.strided
    return plain and 1 < tensor.numel() == max(tensor.shape, default=1)
