"""Layouts of results that torch computes in Python, which would take most of the time of a first recording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.ops.convolving import output_sizes
from engine.program.signature import signature
from engine.running.fakes import Layout

__all__ = ["layout_of_result"]

_ATEN = torch.ops.aten
_STORED = ("weight", "bias", "running_mean", "running_var")


def layout_of_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layout | None:
    """Return the layout of an op's result; None if the op has to run to determine it, or to reject its arguments.

    Args:
        func: overload of an op.
        args: its arguments.
        kwargs: its keyword arguments.

    Example:
        >>> images, kernels = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
        >>> layout_of_result(torch.ops.aten.conv2d.default, (images, kernels), {}).shape
        (1, 4, 6, 6)
    """
    layout_of = _LAYOUTS.get(func)
    return None if layout_of is None else layout_of(signature(func).bind(args, kwargs))


def _of_batch_norm(arguments: Mapping[str, Any]) -> Layout | None:
    x: Tensor = arguments["input"]
    sizes = [arguments[name].shape for name in _STORED if arguments[name] is not None]
    fits = x.ndim > 1 and all(shape == x.shape[1:2] for shape in sizes)
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return Layout.of(x) if fits and (x.is_contiguous() or last) else None


def _of_layer_norm(arguments: Mapping[str, Any]) -> Layout | None:
    x, shape = arguments["input"], tuple(arguments["normalized_shape"])
    scales = [arguments[name] for name in ("weight", "bias") if arguments[name] is not None]
    fits = bool(shape) and tuple(x.shape[-len(shape) :]) == shape and all(tuple(t.shape) == shape for t in scales)
    return Layout.of(x) if fits and x.is_floating_point() and _are_alike(x, *scales) and _is_plain(x) else None


def _of_linear(arguments: Mapping[str, Any]) -> Layout | None:
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    scales = [weight] if bias is None else [weight, bias]
    if x.ndim < 2 or weight.ndim != 2 or not _are_alike(x, *scales) or not _is_plain(x, weight):
        return None
    fits = x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    return Layout.contiguous((*x.shape[:-1], len(weight)), x) if fits else None


def _of_convolution(arguments: Mapping[str, Any]) -> Layout | None:
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    alike = _are_alike(x, *([weight] if bias is None else [weight, bias]))
    if not alike or x.ndim != weight.ndim or not _is_plain(x, weight) or not _are_steps(arguments, weight.ndim - 2):
        return None
    groups, outputs = arguments["groups"], len(weight)
    fits = groups > 0 and x.shape[1] == weight.shape[1] * groups and outputs % groups == 0
    sides = output_sizes(arguments)
    if not fits or (bias is not None and bias.shape != (outputs,)) or min(sides) < 1:
        return None
    return Layout.contiguous((len(x), outputs, *sides), x)


def _are_steps(arguments: Mapping[str, Any], dims: int) -> bool:
    """Whether a convolution has as many numbers as torch accepts, none of them too small."""
    least = {"stride": 1, "padding": 0, "dilation": 1}
    return all(
        not isinstance(numbers := arguments[name], str) and len(numbers) in (1, dims) and min(numbers) >= smallest
        for name, smallest in least.items()
    )


def _of_pool(arguments: Mapping[str, Any]) -> Layout | None:
    x: Tensor = arguments["self"]
    sides = arguments["output_size"]
    fits = x.ndim in (3, 4) and len(sides) == 2 and min(sides) > 0 and x.is_floating_point()
    return Layout.contiguous((*x.shape[:-2], *sides), x) if fits and _is_plain(x) else None


def _are_alike(*tensors: Tensor) -> bool:
    """Whether all tensors have one dtype and one device."""
    return len({(t.dtype, t.device) for t in tensors}) == 1


def _is_plain(*tensors: Tensor) -> bool:
    """Whether tensors have elements and are contiguous with the usual strides: other strides are other formats."""
    return all(t.numel() and Layout.of(t) == Layout.contiguous(tuple(t.shape), t) for t in tensors)


_LAYOUTS = {
    _ATEN.batch_norm.default: _of_batch_norm,
    _ATEN.conv1d.default: _of_convolution,
    _ATEN.conv2d.default: _of_convolution,
    _ATEN.conv3d.default: _of_convolution,
    _ATEN.adaptive_avg_pool2d.default: _of_pool,
    _ATEN.layer_norm.default: _of_layer_norm,
    _ATEN.linear.default: _of_linear,
}
