"""Different tensors that share memory, as in ``decoder.weight.data = encoder.weight.data.t()``.

An optimizer step on one of them changes the others, too. A compaction allocates new memory for each tensor, so
afterwards it makes them share memory again if the same entries of both remain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from engine.compaction.folds import Fold
from engine.compaction.slices import Slice
from engine.program.stored import distinct_modules, stored_tensors

__all__ = ["Sharing", "separated", "sharing_of"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Moves = Mapping[int, Callable[[Tensor], Tensor]]
"""Maps of the entries of tensors, by identity of the tensor: a slice, or its inverse with zeros for new entries."""


class Sharing:
    """Two tensors that overlap in memory.

    Args:
        names: their names.
        tensors: the tensors before the compaction.
        stored: whether both are parameters or buffers; otherwise the second is another attribute.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> pair = Sharing(("a", "b"), (weight, weight.t()), True)
        >>> first, second = map(id, pair.tensors)
        >>> pair.order({first: lambda t: t[:1]}), pair.order({first: lambda t: t[:1], second: lambda t: t[:, :1]})
        (None, (1, 0))
    """

    def __init__(self, names: tuple[str, str], tensors: tuple[Tensor, Tensor], stored: bool) -> None:
        self.names, self.tensors, self.stored = names, tensors, stored
        self._layouts = [(t.shape, t.stride(), t.storage_offset()) for t in tensors]

    def order(self, moves: Moves) -> tuple[int, ...] | None:
        """Return the permutation of the first tensor's dimensions that has the memory layout of the second afterwards.

        None if there is none.

        Args:
            moves: maps of the entries.
        """
        if not self.stored:
            return None
        one, other = (self._places(k, moves.get(id(tensor))) for k, tensor in enumerate(self.tensors))
        if one.ndim != other.ndim:
            return None
        orders = itertools.permutations(range(one.ndim))
        return next((order for order in orders if torch.equal(one.permute(order), other)), None)

    def _places(self, k: int, move: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Number the memory locations of a tensor's entries; 0 for new entries."""
        shape, strides, offset = self._layouts[k]
        places = torch.full(shape, offset - min(offset for _, _, offset in self._layouts) + 1)
        for dim, stride in enumerate(strides):
            places += (torch.arange(shape[dim]) * stride).view([-1 if d == dim else 1 for d in range(len(shape))])
        return places if move is None else move(places)

    def __str__(self) -> str:
        return f"{self.names[0]!r} and {self.names[1]!r}"


def sharing_of(model: nn.Module) -> list[Sharing]:
    """Return the pairs of different tensors of a model that overlap in memory.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        >>> sharing_of(net)
        []
        >>> net[1].weight.data = net[0].weight.data.t()
        >>> [str(pair) for pair in sharing_of(net)]
        ["'0.weight' and '1.weight'"]
    """
    places: dict[int, list[tuple[int, int, str, Tensor, bool]]] = {}
    for name, tensor, is_stored in _tensors(model):
        if _has_memory(tensor):
            start = int(tensor.storage_offset())
            extent = sum(int((n - 1) * stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            key = tensor.untyped_storage().data_ptr()
            places.setdefault(key, []).append((start, start + extent, name, tensor, is_stored))
    return [pair for entries in places.values() if len(entries) > 1 for pair in _overlaps(entries)]


def _overlaps(entries: list[tuple[int, int, str, Tensor, bool]]) -> Iterator[Sharing]:
    entries = sorted(entries, key=lambda entry: (entry[0], not entry[4]))
    for k, (_, end, name, tensor, is_stored) in enumerate(entries):
        for start, _, other_name, other, other_stored in entries[k + 1 :]:
            if start > end:
                break
            if is_stored:
                yield Sharing((name, other_name), (tensor, other), other_stored)
            elif other_stored:
                yield Sharing((other_name, name), (other, tensor), False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each tensor once, with a name: first stored tensors, then those in attributes."""
    seen: set[int] = set()
    for name, tensor in stored_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor, True
    for path, module in distinct_modules(model).items():
        for key, value in vars(module).items():
            for tensor in () if key in _OF_EVERY_MODULE else _members(value):
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}".lstrip("."), tensor, False


def _members(value: Any) -> Iterable[Any]:
    if type(value) in (list, tuple, dict):
        return value.values() if isinstance(value, dict) else value  # type: ignore[no-any-return]
    return (value,)


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return False
    return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() != 0


def separated(
    model: nn.Module, slices: Mapping[str, Slice], masks: Mapping[str, Tensor], folds: Iterable[Fold]
) -> list[Sharing]:
    """Return the pairs of tensors that share memory before a compaction, but not afterwards.

    Args:
        model: the model before the compaction.
        slices, masks, folds: fields of the plan.
    """
    tensors = stored_tensors(model)
    moves = {id(tensors[name]): cut.apply for name, cut in slices.items()}
    inner = {id(tensors[name]): mask for name, mask in masks.items()}
    folded = {id(tensors[fold.name]) for fold in folds}

    def separates(pair: Sharing) -> bool:
        one, other = map(id, pair.tensors)
        if {one, other}.isdisjoint({*moves, *inner, *folded}):
            return False
        order = None if {one, other} & folded else pair.order(moves)
        if order is None:
            return True
        mask, same = inner.get(one), inner.get(other)
        if mask is None or same is None:
            return mask is not same
        return not bool((mask.permute(order) == same).all())

    return [pair for pair in sharing_of(model) if separates(pair)]
