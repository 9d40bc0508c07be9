"""Tensors in nested containers: lists, tuples, mappings, and dataclasses where they are only looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]

# Most of what an op is given; to ask whether these are containers costs more than all else.
_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _items(tree: Any) -> Iterable[Any]:
    """Return what a container holds; nothing for anything else."""
    if type(tree) in (list, tuple):
        return tree  # type: ignore[no-any-return]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, (list, tuple)) else ()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif type(tree) not in _LEAVES:
        for item in _items(tree):
            if type(item) not in _LEAVES:
                yield from tensors_in(item)


def map_tensors(tree: Any, f: Callable[[Tensor], Any]) -> Any:
    """Return nested lists, tuples and mappings with ``f`` applied to every tensor."""
    if type(tree) in _LEAVES:
        return tree
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(x, f) for x in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(x, f) for x in tree])
    if type(tree) is dict or isinstance(tree, Mapping):
        return {k: map_tensors(x, f) for k, x in tree.items()}
    return tree
