"""What a run writes into a model's own parameters and buffers, taken back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.recording.opaque_modules import storage_of

__all__ = ["TensorBackup"]


class TensorBackup:
    """Keeps what is in a tensor before it is written to.

    Args:
        stored: parameters and buffers by name.
        anything: whether to keep other memory as well.

    Example:
        >>> weight = torch.ones(3)
        >>> kept = TensorBackup({"weight": weight})
        >>> kept.keep([weight[:1]])
        >>> weight[:1] = 5
        >>> kept.restore()
        >>> weight
        tensor([1., 1., 1.])
    """

    def __init__(self, stored: Mapping[str, Tensor], anything: bool = False) -> None:
        self._stored, self._anything = stored, anything
        self._places: dict[int, list[Tensor]] = {}
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def keep(self, written: Iterable[Any]) -> None:
        """Keep what shares memory with any of these, once."""
        tensors = [t for t in written if isinstance(t, Tensor) and _has_memory(t)]
        if not tensors:
            return
        if not self._places:
            for tensor in filter(_has_memory, self._stored.values()):
                self._places.setdefault(storage_of(tensor), []).append(tensor.detach())
        places = {storage_of(t): t for t in tensors}
        for place in places.keys() - self._places.keys() if self._anything else ():
            self._places[place] = [_all_of(places[place])]
        for place in places.keys() & self._places.keys() - self._kept.keys():
            self._kept[place] = [(tensor, tensor.clone()) for tensor in self._places[place]]

    def restore(self) -> None:
        """Write back what was kept."""
        for pairs in self._kept.values():
            for tensor, before in pairs:
                tensor.copy_(before)


def _all_of(tensor: Tensor) -> Tensor:
    """Return all the memory of a tensor."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided  # a sparse tensor has no piece of memory of its own
