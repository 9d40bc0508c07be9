"""Calls that convert to a lower precision, as in a norm that computes in float32."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine.ops import products, zeros
from engine.program.trees import tensors_in

__all__ = ["run_in_float64", "unrounded"]


@functools.cache
def _dtype_at(func: Any) -> int | None:
    """Position of the argument with the dtype in which an op computes, or to which it converts."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dtype") if "dtype" in names else None


def unrounded(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call such that it stays in float64 instead of converting to a lower precision.

    Args:
        func: overload of an op.
        args, kwargs: its arguments.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> softmax = getattr(torch.ops, "aten").softmax.int
        >>> unrounded(softmax, (x, 0, torch.float32), {})[0][2]
        torch.float64
    """
    position = _dtype_at(func)
    if position is None or all(t.dtype != torch.float64 for t in tensors_in((args, kwargs))):
        return args, kwargs
    if len(args) > position and _is_less(args[position]):
        return (*args[:position], torch.float64, *args[position + 1 :]), kwargs
    return args, kwargs | {"dtype": torch.float64} if _is_less(kwargs.get("dtype")) else kwargs


def run_in_float64(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the ops that the engine computes in float64 itself, and those that would round; return None for others.

    Args:
        func: overload of an op.
        args, kwargs: its arguments.
    """
    exact_args, exact_kwargs = unrounded(func, args, kwargs)
    output = zeros.in_float64(func, exact_args, exact_kwargs)
    output = products.in_float64(func, exact_args, exact_kwargs) if output is None else output
    if output is None and (exact_args is not args or exact_kwargs is not kwargs):
        return func(*exact_args, **exact_kwargs)
    return output


def _is_less(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64
