"""Results that a model's code remembers between calls, of runs that must leave no trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from engine.program.stored import modules_of
from engine.source.sizes import is_tagged, numbers_in

__all__ = ["classes_of", "forgetting", "sizes_anew", "spaces_of"]

_MEMO = type(functools.lru_cache(lambda: None))
_LIBRARIES = ("einops.einops",)  # called from the forward of classes that are elsewhere


@contextmanager
def forgetting(model: nn.Module) -> Iterator[None]:
    """Make functions that remember their results (`functools.lru_cache`) forget those of the body.

    A tensor without data, or one of inference mode, would come back in the next call of the model. Known are functions
    in the Python modules of the model's classes, and in these classes; a function that was not called there forgets
    nothing.

    Example:
        >>> @functools.lru_cache
        ... def ramp(size):
        ...     return list(range(size))
        >>> class Net(nn.Module):
        ...     ramp = staticmethod(ramp)
        >>> with forgetting(Net()):
        ...     found = Net.ramp(3)
        >>> ramp.cache_info().currsize
        0
    """
    calls = {memo: memo.cache_info().misses for memo in _memos(model)}
    try:
        yield
    finally:
        for memo, misses in calls.items():
            if memo.cache_info().misses != misses:
                memo.cache_clear()


@contextmanager
def sizes_anew(model: nn.Module) -> Iterator[None]:
    """Compute again what functions that remember make of sizes, while these remember where they come from.

    What was remembered of an equal shape are plain numbers, and to look it up compares sizes as the model's code would.
    Known are functions in the Python modules of the model's classes, and einops.

    Example:
        >>> @functools.lru_cache
        ... def halved(size):
        ...     return size // 2
        >>> with sizes_anew(nn.ReLU()):
        ...     halved(8)
        4
    """
    spaces = spaces_of(model)
    memo_entries = [(space, key, item) for space in spaces for key, item in space.items() if isinstance(item, _MEMO)]
    for space, key, memo in memo_entries:
        space[key] = _unless_tagged(memo)
    try:
        yield
    finally:
        for space, key, memo in memo_entries:
            space[key] = memo


def _unless_tagged(memo: Any) -> Callable[..., Any]:
    """Return a function that remembers, and does not look there for what it is to make of tagged sizes."""

    @functools.wraps(memo)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = memo.__wrapped__ if any(map(is_tagged, numbers_in((args, kwargs)))) else memo
        return function(*args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        setattr(call, name, getattr(memo, name))
    return call


def spaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the names of the Python modules that the model's classes are in."""
    names = {cls.__module__ for cls in classes_of(model)} | set(_LIBRARIES)
    return [vars(sys.modules[name]) for name in names & sys.modules.keys()]


def classes_of(model: nn.Module) -> list[type]:
    """Return the classes of a model's modules and their bases, without torch's."""
    classes = {cls for kind in {type(m) for _, m in modules_of(model)} for cls in kind.__mro__}
    return [cls for cls in classes if cls is not object and not cls.__module__.startswith("torch.nn")]


def _memos(model: nn.Module) -> Iterator[Any]:
    """Yield the functions that remember."""
    for space in (*spaces_of(model), *map(vars, classes_of(model))):
        for item in list(space.values()):
            yield from _remembering(item)


def _remembering(item: Any) -> Iterator[Any]:
    """Yield a function that remembers, or that a plain function has in its closure."""
    item = getattr(item, "__func__", item) if isinstance(item, (staticmethod, classmethod)) else item
    if isinstance(item, _MEMO):
        yield item
    elif isinstance(item, FunctionType):
        for cell in item.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # it has nothing in it yet
                continue
            if isinstance(inside, _MEMO):
                yield inside
