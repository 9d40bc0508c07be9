"""Tensors reachable from an object: in a function's closure, a generator's variables, or other objects' attributes."""

from __future__ import annotations

import gc
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.limits import MOST_HELD_OBJECTS, MOST_HELD_TENSORS
from engine.program.trees import items_of, tensors_in

__all__ = ["holds_nothing_but_tensors", "tensors_held_by", "tensors_of_variable"]

_NOT_FOLLOWED = (
    type, ModuleType, nn.Module, CodeType, FrameType, str, bytes, int, float, complex, type(None),
    torch.dtype, torch.device, torch.Size, torch.Generator, logging.Logger,
)  # fmt: skip


def tensors_held_by(obj: Any) -> Iterator[Tensor]:
    """Yield the tensors that are reachable from an object, nearest first; modules are not entered.

    The references known to Python's garbage collector are followed: from an iterator to its list, from a partial
    function to its arguments; from a function to its closure and defaults, not its globals; from a generator to its
    variables.

    Args:
        obj: any object; at most 2000 objects reachable from it are visited.

    Example:
        >>> h = torch.ones(2)
        >>> [t is h for t in tensors_held_by(lambda h=h: h.sum())], [t is h for t in tensors_held_by(iter([1, [h]]))]
        ([True], [True])
    """
    waiting, seen = deque([] if isinstance(obj, _NOT_FOLLOWED) else [obj]), {id(obj)}
    while waiting and len(seen) <= MOST_HELD_OBJECTS:
        item = waiting.popleft()
        if isinstance(item, Tensor):
            yield item
            continue
        for part in _parts(item):
            if id(part) not in seen and not isinstance(part, _NOT_FOLLOWED):
                seen.add(id(part))
                waiting.append(part)


def tensors_of_variable(held: Any) -> tuple[str, Sequence[Tensor]]:
    """Return the tensors that code may reach through a variable.

    Args:
        held: the value of the variable.

    Returns:
        ``"values"`` for a tensor, or a container of nothing but tensors and plain data, ``"inside"`` if another kind of
        object holds some of the tensors; and up to 64 tensors.

    Example:
        >>> h = torch.ones(2)
        >>> [tensors_of_variable(held)[0] for held in (h, [h, 1], [lambda h=h: h])]
        ['values', 'values', 'inside']
    """
    plain = list(itertools.islice(tensors_in(held), MOST_HELD_TENSORS))
    if isinstance(held, Tensor) or plain and all(isinstance(item, Tensor) for item in items_of(held)):
        return "values", plain
    reachable = list(itertools.islice(tensors_held_by(held), MOST_HELD_TENSORS))
    return ("values", plain) if len(reachable) <= len({*map(id, plain)}) else ("inside", reachable)


def holds_nothing_but_tensors(held: Any) -> bool:
    """Whether an object is a list, a tuple or a dictionary of tensors, None, and further such containers.

    Example:
        >>> h = torch.ones(2)
        >>> [holds_nothing_but_tensors(held) for held in ([h, None], {"a": (h, h)}, [h, 1], h)]
        [True, True, False, False]
    """
    if type(held) not in (list, tuple, dict):
        return False
    return all(item is None or isinstance(item, Tensor) or holds_nothing_but_tensors(item) for item in items_of(held))


def _parts(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        return [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, item.__dict__]
    if isinstance(item, GeneratorType):
        frame = item.gi_frame
        return [] if frame is None else list(frame.f_locals.values())
    return gc.get_referents(item)
