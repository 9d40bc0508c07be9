"""Which slots are alike: those that touch the same parameter dimensions form one dependency group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.propagate import Structure

__all__ = ["clusters"]


def clusters(structure: Structure, slots: Tensor | None = None, balanced: bool = True) -> Tensor:
    """Return the number of each slot's group, int64 ``(slots,)``; -1 for slots that are not asked for.

    Slots are told apart by the set of sites that they touch: a dimension of a stored tensor and, where ``balanced``,
    a piece that has to keep as many as another piece. Sets are compared by the sum of random 62-bit numbers, one per
    site.

    Args:
        structure: the slots.
        slots: bool per slot, which to number; those that may go by default.
        balanced: whether pieces of a chunk and groups of a convolution are apart.
    """
    sites = list(_sites(structure, balanced))
    numbers = torch.randint(2**62, (len(sites), 1), generator=torch.Generator().manual_seed(0))
    signature = torch.zeros(len(structure.roots), dtype=torch.long)
    for site, number in zip(sites, numbers, strict=True):
        signature[site] = signature[site] + number  # a slot that stands in a site twice is written the same sum twice
    group = torch.full_like(signature, -1)
    wanted = structure.free() if slots is None else slots
    group[wanted] = signature[wanted].unique(return_inverse=True)[1]
    return group


def _sites(structure: Structure, balanced: bool) -> Iterator[Tensor]:
    for value in structure.graph.values:
        if value.stored:
            yield from (layer.reshape(-1) for layer in structure.of(value) if layer.numel() > 1)
    for constraint in structure.constraints if balanced else ():
        yield from (site.reshape(-1) for site in constraint.sites())
