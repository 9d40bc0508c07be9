"""Function caches in a model's code: recorded runs must neither fill them nor read from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from engine.numbers.sizes import is_tagged, numbers_in
from engine.source.model_code import module_namespaces, user_classes

__all__ = ["bypassing_caches", "clearing_caches"]

_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))


@contextmanager
def clearing_caches(model: nn.Module) -> Iterator[None]:
    """Clear the caches (`functools.lru_cache`) that the body adds results to.

    The next call of the model would otherwise get a tensor without data, or one of inference mode. This covers
    functions in the model's classes and in the Python modules that define these. Caches without new results are kept.

    Example:
        >>> @functools.lru_cache
        ... def ramp(size):
        ...     return list(range(size))
        >>> class Net(nn.Module):
        ...     ramp = staticmethod(ramp)
        >>> with clearing_caches(Net()):
        ...     found = Net.ramp(3)
        >>> ramp.cache_info().currsize
        0
    """
    calls = {cached: cached.cache_info().misses for cached in _cached_functions(model)}
    try:
        yield
    finally:
        for cached, misses in calls.items():
            if cached.cache_info().misses != misses:
                cached.cache_clear()


@contextmanager
def bypassing_caches(model: nn.Module) -> Iterator[None]:
    """Bypass caches for calls with tracked sizes.

    A cached result for an equal shape has untracked numbers, and the lookup itself would compare sizes. This covers
    functions in the Python modules that define the model's classes, and in einops.

    Example:
        >>> @functools.lru_cache
        ... def halved(size):
        ...     return size // 2
        >>> with bypassing_caches(nn.ReLU()):
        ...     halved(8)
        4
    """
    spaces = module_namespaces(model)
    entries = [
        (space, key, item) for space in spaces for key, item in space.items() if isinstance(item, _CACHED_FUNCTION)
    ]
    for space, key, cached in entries:
        space[key] = _bypassed_for_tracked_sizes(cached)
    try:
        yield
    finally:
        for space, key, cached in entries:
            space[key] = cached


def _bypassed_for_tracked_sizes(cached: Any) -> Callable[..., Any]:
    """Return a cached function that bypasses its cache for tracked sizes."""

    @functools.wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = cached.__wrapped__ if any(map(is_tagged, numbers_in((args, kwargs)))) else cached
        return function(*args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        setattr(call, name, getattr(cached, name))
    return call


def _cached_functions(model: nn.Module) -> Iterator[Any]:
    """Yield the cached functions of a model's code."""
    for space in (*module_namespaces(model), *map(vars, user_classes(model))):
        for item in list(space.values()):
            yield from _cached_functions_in(item)


def _cached_functions_in(item: Any) -> Iterator[Any]:
    """Yield a cached function, or those in the closure of a plain function."""
    item = getattr(item, "__func__", item) if isinstance(item, (staticmethod, classmethod)) else item
    if isinstance(item, _CACHED_FUNCTION):
        yield item
    elif isinstance(item, FunctionType):
        for cell in item.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if isinstance(inside, _CACHED_FUNCTION):
                yield inside
