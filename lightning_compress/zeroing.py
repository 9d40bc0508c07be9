"""Keep masked entries of parameters at zero, cheaply: where rows or columns are masked, only those are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Zeroing:
    """The masked entries of one parameter.

    Attributes:
        parameter: whose weights and gradient are written.
        weights: whether its weights are; those under `torch.nn.utils.prune` are masked by a buffer.
        dim: dimension of which whole slices are masked, or -1.
        masked: int64 indices along ``dim``; where there is no such dimension, a bool mask of what is masked.
    """

    parameter: nn.Parameter
    weights: bool
    dim: int
    masked: Tensor

    @classmethod
    def of(cls, parameter: nn.Parameter, mask: Tensor, weights: bool = True) -> Zeroing:
        """Return what zeroes the entries of a parameter at which ``mask`` is False.

        Example:
            >>> Zeroing.of(nn.Parameter(torch.ones(2, 3)), torch.tensor([True, False, True]).expand(2, 3)).masked
            tensor([1])
        """
        for dim in range(mask.ndim):
            rows = mask.movedim(dim, 0).reshape(mask.size(dim), -1)
            some = rows.any(1)
            if torch.equal(some, rows.all(1)):
                return cls(parameter, weights, dim, (~some).nonzero()[:, 0])
        return cls(parameter, weights, -1, ~mask)

    def fill(self, tensor: Tensor) -> None:
        """Zero the masked entries of the parameter's data or gradient."""
        if self.dim < 0:
            tensor.masked_fill_(self.masked, 0)
        elif len(self.masked):
            tensor.index_fill_(self.dim, self.masked, 0)


@torch.no_grad()
def zero_weights(zeroings: Iterable[Zeroing]) -> None:
    """Zero masked weights."""
    for zeroing in zeroings:
        if zeroing.weights:
            zeroing.fill(zeroing.parameter)


@torch.no_grad()
def zero_gradients(zeroings: Iterable[Zeroing]) -> None:
    """Zero the gradients of masked weights, so that clipping by norm does not see them."""
    for zeroing in zeroings:
        if zeroing.parameter.grad is not None:
            zeroing.fill(zeroing.parameter.grad)
