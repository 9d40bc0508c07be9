"""Copies of callbacks, which note what they like."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["copied"]

_CONTAINERS = (dict, list, set, deque, tuple)


def copied(callback: Any) -> Any:
    """A copy with containers and tensors of its own; modules, which are put back, and other objects are shared.

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
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # what no hook reads is no part of a recording
        vars(other).update((name, _own(value)) for name, value in vars(callback).items())
    return other


def _own(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) in (list, set, tuple):
        return type(value)(map(_own, value))
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value
