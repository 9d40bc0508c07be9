"""Results that a model's code remembers between calls, of runs that must leave no trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from engine.program.stored import modules_of

__all__ = ["forgetting"]

_MEMO = type(functools.lru_cache(lambda: None))


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


def _memos(model: nn.Module) -> Iterator[Any]:
    """Yield the functions that remember."""
    classes = {cls for kind in {type(m) for _, m in modules_of(model)} for cls in kind.__mro__}
    own = [cls for cls in classes if cls is not object and not cls.__module__.startswith("torch.nn")]
    spaces = [vars(sys.modules[name]) for name in {cls.__module__ for cls in own} & sys.modules.keys()]
    for space in (*spaces, *map(vars, own)):
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
