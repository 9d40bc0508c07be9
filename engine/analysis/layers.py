"""Label arrays of all values in one array, so that a single lookup evaluates a choice of slots for all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.program.arrays import support

__all__ = ["Layers"]


class Layers:
    """Concatenated label arrays; values that share a layer share its position.

    Args:
        layers: layers by value index; they have to be kept alive, since they are compared by identity.

    Example:
        >>> layers = Layers({0: (torch.tensor([[1, 2, 3]]),), 1: (torch.tensor([4, 5]),)})
        >>> chosen = torch.tensor([False, True, False, True, True, True])
        >>> layers.of(0), layers.of(1), layers.counts(layers.look(chosen))
        (((1, 0),), ((0, 1),), [2, 2])
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, ...]]) -> None:
        distinct = {id(layer): layer for own in layers.values() for layer in own}
        places = {key: (support(layer), place) for place, (key, layer) in enumerate(distinct.items())}
        self.sizes = [layer.numel() for layer in distinct.values()]
        self._ends = np.cumsum(self.sizes, dtype=np.int64)
        self._slots = (
            torch.cat([layer.reshape(-1) for layer in distinct.values()])
            if distinct
            else torch.zeros(0, dtype=torch.long)
        )
        self._plain: dict[int, tuple[tuple[int, int], ...] | None] = {}
        self._all: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = {}
        for index, own in layers.items():
            entries = self._all[index] = tuple(places[id(layer)] for layer in own)
            dims = [dim for touched, _ in entries for dim in touched]
            plain = all(len(touched) == 1 for touched, _ in entries) and len(set(dims)) == len(dims)
            self._plain[index] = tuple((touched[0], place) for touched, place in entries) if plain else None

    def of(self, index: int) -> tuple[tuple[int, int], ...] | None:
        """Return (dimension, position) of each layer of a value; None if a layer spans several dimensions."""
        return self._plain.get(index, ())

    def touched(self, index: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return (dimensions, position) of each layer of a value."""
        return self._all.get(index, ())

    def look(self, chosen: Tensor) -> Tensor:
        """Return which entries are chosen, concatenated over all layers."""
        return chosen[self._slots]

    def counts(self, looked: Tensor) -> list[int]:
        """Return the number of chosen entries of each layer."""
        total = np.cumsum(looked.numpy(), dtype=np.int64)
        upto: npt.NDArray[np.int64] = np.concatenate([[0], total])[self._ends]
        return np.diff(upto, prepend=0).tolist()

    def parts(self, looked: Tensor) -> list[Tensor]:
        """Return the entries of each layer, flat."""
        return list(looked.split(self.sizes))
