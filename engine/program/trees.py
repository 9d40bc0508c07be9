"""Tensors in nested containers: lists, tuples, mappings, and (read-only) dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["items_of", "list_tensors", "map_tensors", "results_in", "tensors_in"]

_NO_RESULTS = (type, FunctionType, ModuleType, nn.Module)

# Most arguments of ops; checking whether they are containers would dominate the cost.
_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def items_of(tree: Any) -> Iterable[Any]:
    """Return the items of a container; nothing for anything else.

    Example:
        >>> list(items_of({"a": 1, "b": 2})), list(items_of("text"))
        ([1, 2], [])
    """
    kind = type(tree)
    if kind is list or kind is tuple:
        return tree  # type: ignore[no-any-return]
    if kind is dict:
        return tree.values()  # type: ignore[no-any-return]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return list(_fields(tree))
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, (list, tuple)) else ()


def _fields(obj: Any) -> Iterator[Any]:
    """Yield the fields of a dataclass that have a value, without running what its class does when they are read."""
    for field in dataclasses.fields(obj):
        with contextlib.suppress(AttributeError):
            yield object.__getattribute__(obj, field.name)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif type(tree) not in _LEAVES:
        for item in items_of(tree):
            if type(item) in _LEAVES:
                continue
            if isinstance(item, Tensor):
                yield item
            else:
                yield from tensors_in(item)


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of `tensors_in` as a list, in a third of the time for the arguments of an op.

    Example:
        >>> list_tensors((torch.zeros(2), None, [torch.ones(1), 3], {"a": 1.0}))
        [tensor([0., 0.]), tensor([1.])]
    """
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is not tuple and kind is not list and kind is not dict:
        return list(tensors_in(tree))
    tensors: list[Tensor] = []
    for item in tree.values() if kind is dict else tree:
        if type(item) in _LEAVES:
            continue
        if isinstance(item, Tensor):
            tensors.append(item)
        else:
            tensors += list_tensors(item)
    return tensors


def results_in(tree: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors and floats reachable from an object, as tensors, through containers and attributes.

    Each object is visited once. Classes, functions and modules are skipped, and so are objects without attributes that
    Python can see.


    Example:
        >>> from types import SimpleNamespace
        >>> [float(t) for t in results_in({"a": SimpleNamespace(b=[torch.ones(1), 2.5], c="text")})]
        [1.0, 2.5]
    """
    seen = set() if seen is None else seen
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (Tensor, float)):
            yield item if isinstance(item, Tensor) else torch.tensor(item, dtype=torch.float64)
        elif type(item) not in _LEAVES and not isinstance(item, _NO_RESULTS) and id(item) not in seen:
            seen.add(id(item))
            waiting += reversed([*items_of(item), *_attributes(item)])


def _attributes(obj: Any) -> Iterable[Any]:
    """Return the attribute values of an object; nothing for builtin containers."""
    if type(obj) in (list, tuple, dict, set, frozenset):
        return ()
    names = [name for cls in type(obj).__mro__ for name in _slots(cls)]
    slots = [value for name in names if (value := getattr(obj, name, None)) is not None]
    return [*getattr(obj, "__dict__", {}).values(), *slots]


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    private = [f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") else name for name in names]
    return [name for name in private if name not in ("__dict__", "__weakref__")]


def map_tensors(tree: Any, f: Callable[[Tensor], Any]) -> Any:
    """Return nested lists, tuples and mappings with ``f`` applied to every tensor."""
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if kind is tuple or kind is list:
        return kind([x if type(x) in _LEAVES else map_tensors(x, f) for x in tree])
    if kind is dict:
        return {k: x if type(x) in _LEAVES else map_tensors(x, f) for k, x in tree.items()}
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(x, f) for x in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(x, f) for x in tree])
    if isinstance(tree, Mapping):
        return {k: map_tensors(x, f) for k, x in tree.items()}
    return tree
