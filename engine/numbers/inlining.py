"""Functions of `torch.nn.functional` that reshape tensors, run line by line so that sizes stay tracked.

Inside a function that takes part in the override protocol, no function mode is active. Shapes that it checks and sizes
that it passes on would be plain numbers, like literals in its source.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

__all__ = ["inlined"]

_OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _return_false(*arguments: Any) -> bool:
    return False


@functools.cache
def inlined(function: Hashable) -> FunctionType | None:
    """Return a copy of a function of `torch.nn.functional` that calls ``view``, without the override protocol.

    Args:
        function: any function.

    Returns:
        A function with the same code, or None for any other function.

    Example:
        >>> inlined(F.multi_head_attention_forward).__name__, inlined(F.linear)
        ('multi_head_attention_forward', None)
    """
    if not isinstance(function, FunctionType) or function.__module__ != F.__name__:
        return None
    if "view" not in function.__code__.co_names:
        return None
    space = {**function.__globals__, **dict.fromkeys(_OVERRIDES, _return_false)}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
