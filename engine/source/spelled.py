"""Torch's functions in Python that lay tensors out by sizes: run line by line, with sizes that remember.

A function that takes part in the override protocol runs without a watcher inside. What it asserts of shapes, and the
sizes that it passes on, would then be plain numbers, as if its author had written them down.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

__all__ = ["spelled_out"]

_OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no(*arguments: Any) -> bool:
    return False


@functools.cache
def spelled_out(function: Hashable) -> FunctionType | None:
    """Return a function of torch's that calls `view` on a tensor as one that asks nobody to run it otherwise.

    Args:
        function: any function.

    Returns:
        The same code; None for what is not such a function.

    Example:
        >>> spelled_out(F.multi_head_attention_forward).__name__, spelled_out(F.linear)
        ('multi_head_attention_forward', None)
    """
    if not isinstance(function, FunctionType) or function.__module__ != F.__name__:
        return None
    if "view" not in function.__code__.co_names:
        return None
    space = {**function.__globals__, **dict.fromkeys(_OVERRIDES, _no)}
    again = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    again.__kwdefaults__ = function.__kwdefaults__
    return again
