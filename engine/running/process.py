"""Restoration of what a model's code may change in the process: random states, flags and filters."""

from __future__ import annotations

import contextvars
import functools
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

__all__ = ["EXCLUSIVE", "random_state", "seed_generators", "seeded", "silenced", "unchanged_process"]

EXCLUSIVE = threading.RLock()
"""Lock held while a model runs for an analysis, which temporarily changes classes, Python modules and random states."""


def _set_filters(filters: Any) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # on leaving, Python forgets which warnings it has shown under other filters


# Functions of torch are kept as they are now: those that say how code runs are others while a model's code is watched.
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda s: torch.use_deterministic_algorithms(s[0], warn_only=s[1]),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (lambda: torch.backends.cudnn.enabled, torch._C._set_cudnn_enabled),
    (lambda: torch.backends.cudnn.benchmark, torch._C._set_cudnn_benchmark),
    (lambda: torch.backends.cudnn.deterministic, torch._C._set_cudnn_deterministic),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (functools.partial(torch.is_autocast_enabled, "cpu"), functools.partial(torch.set_autocast_enabled, "cpu")),
    (functools.partial(torch.is_autocast_enabled, "cuda"), functools.partial(torch.set_autocast_enabled, "cuda")),
    (random.getstate, random.setstate),
    (lambda: list(warnings.filters), _set_filters),
)


def _nothing(record: logging.LogRecord) -> bool:
    """Reject all records."""
    return False


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Silence a logger in the body.

    Args:
        name: of the logger.

    Example:
        >>> with silenced("noise"):
        ...     logging.getLogger("noise").error("heard by nobody")
    """
    log = logging.getLogger(name)
    log.addFilter(_nothing)  # setting a level would clear the caches of all loggers each time
    try:
        yield
    finally:
        log.removeFilter(_nothing)


@contextmanager
def seeded(devices: Iterable[int] = ()) -> Iterator[None]:
    """Seed torch, Python and NumPy in the body, and restore their random states afterwards.

    Args:
        devices: CUDA devices whose generators are seeded, too.

    Example:
        >>> with seeded():
        ...     first = torch.rand(2), random.random()
        >>> with seeded():
        ...     second = torch.rand(2), random.random()
        >>> torch.equal(first[0], second[0]), first[1] == second[1]
        (True, True)
    """
    indices, before = list(devices), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=indices):
        try:
            torch.default_generator.manual_seed(0)
            for index in indices:
                torch.cuda.default_generators[index].manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def seed_generators(seed: int) -> None:
    """Seed the generators of all devices, like `torch.manual_seed`.

    For each missing kind of device, torch keeps the stack of every such call forever, so this skips them.

    Example:
        >>> seed_generators(3)
        >>> first = torch.rand(2)
        >>> _ = torch.manual_seed(3)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    (torch.manual_seed if _has_accelerator() else torch.default_generator.manual_seed)(seed)


def random_state() -> tuple[Any, ...]:
    """Return the states of torch's generators for the CPU and, once CUDA is in use, each GPU, Python's and NumPy's.

    Example:
        >>> before = random_state()
        >>> before == random_state(), torch.rand(1).shape, before == random_state()
        (True, torch.Size([1]), False)
    """
    kind, keys, *rest = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = (state.numpy().tobytes() for state in (torch.get_rng_state(), *devices))
    return *states, random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore flags, the random states of Python and NumPy, and context variables after the body.

    Example:
        >>> before = random.getstate()
        >>> with unchanged_process():
        ...     _ = random.random()
        ...     torch.set_default_dtype(torch.float64)
        >>> random.getstate() == before, torch.get_default_dtype()
        (True, torch.float32)
    """
    numpy = sys.modules.get("numpy.random")
    with ExitStack() as restoring:  # all of it, even where a part fails
        for read, write in _FLAGS:
            restoring.callback(_restore, read, write, read())
        if numpy is not None:
            restoring.callback(numpy.set_state, numpy.get_state())
        restoring.callback(_restore_variables, dict(contextvars.copy_context()))
        yield


def _restore(read: Callable[[], Any], write: Callable[[Any], Any], before: Any) -> None:
    if read() != before:
        write(before)


def _restore_variables(before: Mapping[ContextVar[Any], Any]) -> None:
    """Restore context variables; those that were not set become their default, as they cannot be unset."""
    empty = contextvars.Context()
    for variable, value in contextvars.copy_context().items():
        if variable not in before:
            with suppress(LookupError):  # it has no default
                variable.set(empty.run(variable.get))
        elif before[variable] is not value:
            variable.set(before[variable])
