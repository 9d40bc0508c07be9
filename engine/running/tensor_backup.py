"""Undoing of a run's writes to a model's own parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.program.storages import storage_of

__all__ = ["TensorBackup", "unwritten"]


class TensorBackup:
    """Keeps the content of tensors before they are written to.

    Args:
        stored: parameters and buffers by name.
        anything: whether to keep the content of other tensors as well.

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
        """Keep the content of the tensors that share memory with any of these, once."""
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
        """Restore the kept contents."""
        for pairs in self._kept.values():
            for tensor, before in pairs:
                tensor.copy_(before)


@contextmanager
def unwritten(model: nn.Module, but: Iterable[Tensor] = ()) -> Iterator[None]:
    """Run the body, and undo its writes to parameters and buffers.

    Args:
        model: the model.
        but: tensors whose writes are not undone.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with unwritten(norm), torch.no_grad():
        ...     _ = norm(torch.ones(3, 2)), norm.weight.zero_()
        >>> norm.running_mean, norm.weight.data
        (tensor([0., 0.]), tensor([1., 1.]))
    """
    skipped = set(map(id, but))
    kept = (b for b in model.buffers() if id(b) not in skipped and _has_memory(b) and not b.is_meta)
    buffers = [(b, b.detach().clone()) for b in kept]
    backup = TensorBackup({name: p for name, p in model.named_parameters() if id(p) not in skipped})
    try:
        with _Keeping(backup):
            yield
    finally:
        with torch.no_grad():
            backup.restore()
            for buffer, before in buffers:  # a norm writes to its statistics, which its schema does not say
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


class _Keeping(TorchDispatchMode):
    """Keeps the content of tensors before an op writes to them."""

    def __init__(self, backup: TensorBackup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backup = backup

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                self._backup.keep(written if isinstance(written, (list, tuple)) else [written])
        return func(*args, **kwargs)


def _all_of(tensor: Tensor) -> Tensor:
    """Return all the memory of a tensor."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided  # a sparse tensor has no piece of memory of its own
