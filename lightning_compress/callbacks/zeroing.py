"""Zeroing of masked entries, in one pass over the memory of the masked parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.program import local, spread

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by number of bytes per entry."""


@dataclass(frozen=True, eq=False)
class Zeroing:
    """The masked entries of one parameter, or of a table in a buffer.

    Attributes:
        parameter: the parameter whose weights and gradient are zeroed; if it is sharded, the local shard is.
        weights: whether to zero the weights, too; those under `torch.nn.utils.prune` are masked by a buffer.
        masked: bool, True for masked entries; of size 1 along dimensions along which the mask is constant.
        bits: the kept entries as integers of the parameter's item size with all bits set or none, for ``bitwise_and_``;
            ``None`` if they would take as much memory as the parameter.
    """

    parameter: Tensor
    weights: bool
    masked: Tensor
    bits: Tensor | None

    @classmethod
    def of(cls, parameter: Tensor, mask: Tensor, weights: bool = True) -> Zeroing:
        """Build the zeroing of a parameter's entries at which ``mask`` is False.

        Example:
            >>> Zeroing.of(nn.Parameter(torch.ones(2, 3)), torch.tensor([True, False, True]).expand(2, 3)).masked
            tensor([[False,  True, False]])
        """
        own, mask = local(parameter), local(spread(mask, parameter))
        keep = mask
        for dim in range(mask.ndim):
            first = keep.narrow(dim, 0, min(1, keep.size(dim)))
            keep = first if torch.equal(first.expand_as(keep), keep) else keep
        kind = INTEGERS.get(parameter.element_size())
        small = kind is not None and (mask.ndim <= 1 or keep.numel() < mask.numel())
        bits = -keep.to(kind) if small else None
        if bits is not None and bits.ndim > 1 and bits.size(0) == 1 < len(own):
            # Broadcast along the first dimension only: 3 × 3 kernels are too short for an inner loop each.
            bits = torch.empty_like(own[:1], dtype=kind).copy_(bits)
        return cls(parameter, weights, ~keep, bits)

    def is_undone(self) -> bool:
        """Whether a masked weight is not zero.

        Example:
            >>> zeroing = Zeroing.of(nn.Parameter(torch.ones(2)), torch.tensor([True, False]))
            >>> zeroing.is_undone()
            True
        """
        return self.weights and bool(local(self.parameter.detach()).masked_fill(~self.masked, 0).count_nonzero())

    def fill(self, tensor: Tensor) -> None:
        """Zero the masked entries of the parameter's data or gradient."""
        tensor = local(tensor)
        # Multiplying would turn masked infinities into NaN; filling by index or mask takes 2 to 4 times as long.
        if self.bits is None or tensor.dtype != self.parameter.dtype:
            tensor.masked_fill_(self.masked, 0)
        else:
            tensor.view(self.bits.dtype).bitwise_and_(self.bits)


@torch.no_grad()
def zero_weights(zeroings: Iterable[Zeroing]) -> None:
    """Zero masked weights."""
    for zeroing in zeroings:
        if zeroing.weights:
            zeroing.fill(zeroing.parameter)


@torch.no_grad()
def zero_gradients(zeroings: Iterable[Zeroing]) -> None:
    """Zero the gradients of masked weights, so that they do not count in clipping by norm."""
    for zeroing in zeroings:
        if zeroing.parameter.grad is not None:
            zeroing.fill(zeroing.parameter.grad)
