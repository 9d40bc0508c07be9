"""Copies of callbacks, whose changes do not affect the originals."""

from __future__ import annotations

import copy
from collections import deque
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_compress.trainer.packages import Callback

__all__ = ["copied"]

_CONTAINERS = (dict, list, set, deque, tuple)


def copied(callback: Any) -> Any:
    """Copy a callback with its containers, tensors and objects of its package; others, like modules, are shared.

    Args:
        callback: any object with attributes.

    Example:
        >>> import types
        >>> one = types.SimpleNamespace(seen=[[1]])
        >>> copied(one).seen[0].append(2)
        >>> one.seen
        [[1]]
    """
    other = copy.copy(callback)
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # copying is no part of a recording
        package, copies = type(callback).__module__.partition(".")[0], {id(callback): other}
        vars(other).update((name, _own(value, package, copies)) for name, value in vars(callback).items())
    return other


def _own(value: Any, package: str, copies: dict[int, Any]) -> Any:
    """Return a copy, always the same for one object; objects of other packages are shared."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _own(item, package, copies) for key, item in value.items()}
    if type(value) in (list, set, tuple):
        return type(value)(_own(item, package, copies) for item in value)
    if _is_plain_object(value, package):
        copies[id(value)] = other = copy.copy(value)
        vars(other).update((name, _own(item, package, copies)) for name, item in vars(value).items())
        return other
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_plain_object(value: Any, package: str) -> bool:
    """Whether an object of a callback's own package holds plain state, such as a dataclass."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != package or isinstance(value, (*_CONTAINERS, Enum, nn.Module, Callback)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type)
