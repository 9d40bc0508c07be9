"""Random projections of channels: a few numbers that distinguish two tensors without storing either.

For ``r ~ N(0, I)`` the expected square of ``<r, a - b>`` is ``|a - b|²``. If a channel of a single sample holds many
numbers, each of the four projections covers a quarter of them, with twice the weight: the expectation is the same, a
difference across the image is found as well, and it takes a quarter of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PROJECTIONS", "Directions", "channel_norms"]

PROJECTIONS = 4
"""Numbers per channel."""

_MANY = 2048
"""Number of entries in a channel from which on the projections share them."""


class Directions:
    """Random directions; shorter ones are prefixes of the longest, so that all are drawn at once.

    Example:
        >>> x = torch.rand(2, 5, 3, 3)
        >>> Directions().project(x, 1).shape
        torch.Size([4, 5])
    """

    def __init__(self) -> None:
        self._drawn: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def _of(self, out: Tensor, dim: int) -> Tensor:
        """Return directions, (projections, numbers per channel)."""
        size = out.numel() // max(out.size(dim), 1)
        directions = self._drawn.get((out.dtype, out.device))
        if directions is None or directions.size(1) < size:
            generator = torch.Generator().manual_seed(size)
            directions = torch.randn(PROJECTIONS, size, generator=generator, dtype=torch.float32).to(out)
            self._drawn[out.dtype, out.device] = directions
        return directions[:, :size]

    def project(self, out: Tensor, dim: int) -> Tensor:
        """Return projections of the entries at each index of a dimension, (projections, channels); mostly in place."""
        random = self._of(out, dim)
        if dim == out.ndim - 1:
            return random @ out.reshape(-1, out.size(-1))
        if dim == 1 and len(out) == 1:
            rows = out[0].flatten(1)
            return _shared(rows, random) if rows.size(1) >= _MANY else random @ rows.T
        if dim == 1:  # channels as columns are several times as fast as that few columns
            by_sample = random.unflatten(1, (out.size(0), -1)).transpose(0, 1)
            return torch.bmm(by_sample, out.flatten(2).transpose(1, 2)).sum(0)
        return (out.movedim(dim, 0).flatten(1) @ random.T).T


def _shared(rows: Tensor, random: Tensor) -> Tensor:
    """Return projections that each cover a part of the columns, (projections, rows)."""
    parts = zip(rows.tensor_split(PROJECTIONS, 1), random[0].tensor_split(PROJECTIONS), strict=True)
    return torch.stack([torch.mv(part, direction) for part, direction in parts]) * PROJECTIONS**0.5


def channel_norms(out: Tensor, dim: int) -> Tensor:
    """Return the norm of the entries at each index along a dimension.

    Example:
        >>> channel_norms(torch.tensor([[3.0, 0.0], [4.0, 2.0]]), 1).tolist()
        [5.0, 2.0]
    """
    return torch.linalg.vector_norm(out, dim=[d for d in range(out.ndim) if d != dim])
