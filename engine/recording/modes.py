"""Train and eval mode: which modules take another path while training, and whether a run could have."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from engine.program.stored import distinct_modules

__all__ = ["readers_of_training", "watched"]


@functools.cache
def _reads_training(cls: type) -> bool:
    """Whether the class's own Python code looks at ``self.training``; torch's own layers do so only for their op."""
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith("torch.nn.modules"):
            continue
        functions = (getattr(f, "__wrapped__", f) for f in vars(base).values())
        if any("training" in f.__code__.co_names for f in functions if hasattr(f, "__code__")):
            return True
    return False


def readers_of_training(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose path may differ while training; leaves do not count: norms and dropout stay in eval."""
    modules = distinct_modules(model).values()
    return [m for m in modules if _has_parts(m) and _reads_training(type(m))]  # type: ignore[arg-type]


def _has_parts(module: nn.Module) -> bool:
    return any(part is not None for part in module._modules.values())


class _Watch:
    """Stands for ``training`` in a class, and notes the modules of which it is read."""

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        self._seen.add(id(module))
        return vars(module)["training"]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["training"] = value


@contextmanager
def watched(modules: Iterable[nn.Module]) -> Iterator[set[int]]:
    """Give the identities of those modules whose ``training`` is read while the body runs.

    A run that never asks is the same in both modes. Classes that define ``training`` themselves, or are watched by
    another thread, count as read.

    Example:
        >>> layer, other = nn.Sequential(), nn.Sequential()
        >>> with watched([layer, other]) as seen:
        ...     print(layer.training, seen == {id(layer)})
        True True
        >>> "training" in vars(nn.Sequential)
        False
    """
    given = list(modules)
    seen: set[int] = set()
    classes = {type(m) for m in given}
    own = {c for c in classes if any("training" in vars(base) for base in c.__mro__)}
    seen |= {id(m) for m in given if type(m) in own}
    for cls in classes - own:
        cls.training = _Watch(seen)  # type: ignore[assignment]
    try:
        yield seen
    finally:
        for cls in classes - own:
            del cls.training
