"""Where new tensors are created: this package's own on the CPU and outside of inference mode, the caller's as before.

``torch.set_default_device`` and ``torch.inference_mode`` act on every tensor that is created without a device, also on
the tables of an analysis, and on parameters that are to be trained later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch

__all__ = ["callers_defaults", "own_defaults"]

_CALLERS: ContextVar[torch.device | None] = ContextVar("callers", default=None)


@contextmanager
def own_defaults() -> Iterator[None]:
    """Create tensors on the CPU, and not as tensors of inference mode; also a decorator.

    Example:
        >>> with torch.device("meta"), own_defaults():
        ...     torch.zeros(1).device
        device(type='cpu')
    """
    with ExitStack() as scope:
        if torch.is_inference_mode_enabled():
            scope.enter_context(torch.inference_mode(False))
        device = torch.get_default_device()
        if device.type != "cpu":
            scope.callback(_CALLERS.reset, _CALLERS.set(device))
            scope.enter_context(torch.device("cpu"))
        yield


@contextmanager
def callers_defaults() -> Iterator[None]:
    """Create tensors on the device that the caller has set, while code of the caller runs; also a decorator.

    Example:
        >>> with torch.device("meta"), own_defaults(), callers_defaults():
        ...     torch.zeros(1).device
        device(type='meta')
    """
    device = _CALLERS.get()
    with ExitStack() as scope:
        if device is not None:
            scope.enter_context(device)
        yield
