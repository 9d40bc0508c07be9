"""Other lengths of the lists, tuples and dictionaries of tensors that a model is called with.

A loop over frames, views or states has one round per item that the caller passes. With one item in the example, the
second round is not recorded, in which a layer reads a computed state instead of zeros.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from engine.limits import DEEPEST_INPUT, MOST_FURTHER_ITEMS
from engine.program.trees import tensors_in

__all__ = ["containers_of_tensors", "longer", "shorter"]


def containers_of_tensors(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the lists, tuples and dictionaries of tensors in an argument, each with its path.

    Args:
        path: name of the argument, and keys in containers.
        value: the argument, or an item of it.

    Example:
        >>> import torch
        >>> [path for path, _ in containers_of_tensors(("x",), {"frames": [torch.zeros(1)], "scale": 2})]
        [('x',), ('x', 'frames')]
    """
    if isinstance(value, (tuple, list, dict)) and len(path) <= DEEPEST_INPUT and any(True for _ in tensors_in(value)):
        yield path, value
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from containers_of_tensors((*path, key), item)


def longer(value: Any, another: Any = None) -> Iterator[Any]:
    """Yield a container with one and with two more items, which are copies of its last one.

    Args:
        value: a list, a tuple or a dictionary.
        another: the item to add if the container is empty.

    Example:
        >>> list(longer([1, 2])), list(longer({"a": 1}))
        ([[1, 2, 2], [1, 2, 2, 2]], [{'a': 1, 'another 1': 1}, {'a': 1, 'another 1': 1, 'another 2': 1}])
    """
    if hasattr(value, "_make"):  # a named tuple has as many as it has names
        return
    items = list(value.values() if isinstance(value, dict) else value)
    last, keys = items[-1] if items else another, _further_keys(value)
    for _ in range(MOST_FURTHER_ITEMS):
        value = type(value)([*value, _copied(last)]) if isinstance(value, tuple) else copy.copy(value)
        if isinstance(value, dict):
            value[next(keys)] = _copied(last)
        elif isinstance(value, list):
            value.append(_copied(last))
        yield value


def shorter(value: Any) -> Iterator[Iterator[Any]]:
    """Yield ways to drop items: the last items of a list one after the other, or each item of a dictionary.

    Args:
        value: a list, a tuple or a dictionary.

    Example:
        >>> [list(way) for way in shorter([1, 2])], [list(way) for way in shorter({"a": 1, "b": 2})]
        ([[[1], []]], [[{'b': 2}], [{'a': 1}]])
    """
    if isinstance(value, dict):
        for key in value:
            other = copy.copy(value)
            del other[key]
            yield iter([other])
    elif not hasattr(value, "_make"):
        cut = (lambda length: value[:length]) if isinstance(value, tuple) else functools.partial(_cut, value)
        yield map(cut, reversed(range(len(value))))


def _cut(value: list[Any], length: int) -> list[Any]:
    """Return the first items of a list, as a list of its class."""
    other = copy.copy(value)
    del other[length:]
    return other


def _further_keys(value: Any) -> Iterator[Any]:
    """Yield keys that a dictionary does not have: integers if all its keys are, else strings."""
    whole = isinstance(value, dict) and bool(value) and all(isinstance(key, int) for key in value)
    first = max(value) if whole else 0
    yield from (first + count if whole else f"another {count}" for count in range(1, MOST_FURTHER_ITEMS + 1))


def _copied(item: Any) -> Any:
    """Return an item with copies of its tensors, because a tensor that is passed twice would be one input."""
    if isinstance(item, Tensor):
        return item.detach().clone()
    if type(item) in (tuple, list):
        return type(item)(map(_copied, item))
    return {key: _copied(own) for key, own in item.items()} if type(item) is dict else copy.copy(item)
