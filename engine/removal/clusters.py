"""Cluster slots into dependency groups: slots that touch the same parameter dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.removal.propagate import Structure

__all__ = ["clusters"]


def clusters(structure: Structure, slots: Tensor | None = None, balanced: bool = True) -> Tensor:
    """Return the group number of each slot, int64 ``(slots,)``; -1 for slots that are not numbered.

    Slots are grouped by the set of sites that they touch: a dimension of a stored tensor and, if ``balanced``, a piece
    that has to keep as many slots as another piece. Sets are compared by the sum of random 62-bit numbers, one per
    site.

    Args:
        structure: the slots.
        slots: bool per slot, which ones to number; removable slots by default.
        balanced: whether pieces of a chunk and groups of a convolution form groups of their own.
    """
    sites = list(_sites(structure, balanced))
    numbers = np.random.default_rng(0).integers(2**62, size=len(sites))
    signature = np.zeros(len(structure.roots), dtype=np.int64)
    for site, number in zip(sites, numbers, strict=True):
        signature[site] += number  # a slot that occurs twice in a site adds the number once
    group = np.full_like(signature, -1)
    wanted = (structure.free() if slots is None else slots).numpy()
    group[wanted] = np.unique(signature[wanted], return_inverse=True)[1]
    return torch.from_numpy(group)


def _sites(structure: Structure, balanced: bool) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the slots of each site; parameters that share one label array are one site."""
    layers = (layer for value in structure.graph.values if value.stored for layer in structure.of(value))
    for layer in {id(layer): layer for layer in layers if layer.numel() > 1}.values():
        yield layer.reshape(-1).numpy()
    for constraint in structure.constraints if balanced else ():
        yield from (site.reshape(-1).numpy() for site in constraint.sites())
