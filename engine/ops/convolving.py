"""Convolutions in float64, for which torch has no native kernels on the CPU.

Torch unfolds a whole batch at once: nine times the input for a 3 x 3 kernel, in fresh memory at each call. Convolving
bands of rows one by one needs a fixed amount of memory that stays in the cache: the same sums in the same order, in
less memory, and in a third of the time where memory is fresh. Torch runs a depthwise convolution as one convolution per
channel; summing shifted images takes half the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.program.signature import signature
from engine.running.recomputed import RecomputedTensor

__all__ = ["COLUMNS", "in_float64", "output_sizes"]

COLUMNS = 4 * 2**20
"""Bytes of columns to unfold at once, unless a single row is longer."""

_PICTURES = 2**20
"""Bytes of images to sum at once; they are read once per kernel entry."""

_OPS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)


@dataclass(frozen=True)
class _Geometry:
    """Geometry of a convolution; one number per spatial dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> _Geometry:
        kernel = list(arguments["weight"].shape[2:])
        stride, padding, dilation = (_each(arguments[name], len(kernel)) for name in ("stride", "padding", "dilation"))
        return cls(kernel, stride, padding, dilation, output_sizes(arguments))

    def tall(self, x: Tensor) -> Tensor:
        """Return a batch padded with zeros along its first spatial dimension."""
        return F.pad(x, [0, 0] * (len(self.kernel) - 1) + [self.padding[0], self.padding[0]])

    def under(self, place: int, dim: int, size: int) -> tuple[slice, slice]:
        """Return the slices of the output and of the input that one entry of the kernel connects along a dimension."""
        first, step = place * self.dilation[dim] - self.padding[dim], self.stride[dim]
        start = max(-(first // step), 0)  # earlier entries meet only padding
        count = max(min(self.sizes[dim], (size - 1 - first) // step + 1) - start, 0)
        begin = first + start * step
        return slice(start, start + count), slice(begin, begin + count * step, step)


def output_sizes(arguments: Mapping[str, Any]) -> list[int]:
    """Return the spatial sizes of what a convolution returns: ``⌊(n + 2p − d(k − 1) − 1) / s⌋ + 1``.

    Args:
        arguments: of the op, by name; ``padding`` in numbers.

    Example:
        >>> images, kernels = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
        >>> output_sizes({"input": images, "weight": kernels, "stride": [2], "padding": [1], "dilation": [1]})
        [4, 4]
    """
    kernel, x = arguments["weight"].shape[2:], arguments["input"]
    stride, padding, dilation = (_each(arguments[name], len(kernel)) for name in ("stride", "padding", "dilation"))
    sides = zip(x.shape[-len(kernel) :], kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]


def in_float64(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Compute a float64 convolution in bands if its columns are large, or as shifted sums if it is depthwise.

    Args:
        func: overload of an op.
        args, kwargs: its arguments.

    Returns:
        The result of the op, or None if torch should compute it.

    Example:
        >>> x, weight = torch.rand(1, 8, 128, 128).double(), torch.rand(4, 8, 3, 3).double()
        >>> result = in_float64(torch.ops.aten.conv2d.default, (x, weight), {})
        >>> torch.testing.assert_close(result, F.conv2d(x, weight))
        >>> in_float64(torch.ops.aten.conv2d.default, (x.float(), weight.float()), {}) is None
        True
    """
    if func not in _OPS:
        return None
    arguments = signature(func).bind(tuple(args), kwargs)
    x, weight = arguments["input"], arguments["weight"]
    if not _lays_out(x, weight):
        return None
    geometry = _Geometry.of(arguments)
    if weight.size(1) == 1 and len(weight) == arguments["groups"] and min(geometry.sizes) > 0:
        return _summed(x, _materialized(weight), arguments["bias"], geometry)
    row = weight.size(1) * math.prod(geometry.kernel) * math.prod(geometry.sizes[1:]) * torch.float64.itemsize
    if row * geometry.sizes[0] * len(x) <= COLUMNS:
        return None
    return _banded(func, arguments | {"weight": _materialized(weight)}, geometry, row)


def _lays_out(x: Tensor, weight: Tensor) -> bool:
    """Whether torch unfolds the input; other memory formats, which its outputs would share, are left to torch."""
    plain = x.is_contiguous() and weight.is_contiguous() and x.ndim == weight.ndim
    return plain and x.dtype == torch.float64 and x.device.type == "cpu" and math.prod(weight.shape[2:]) > 1


def _materialized(weight: Tensor) -> Tensor:
    return weight.materialized() if isinstance(weight, RecomputedTensor) else weight


def _each(number: Sequence[int], count: int) -> list[int]:
    return list(number) * count if len(number) == 1 else list(number)


def _banded(func: Callable[..., Any], arguments: dict[str, Any], geometry: _Geometry, row: int) -> Tensor:
    """Convolve samples and bands of rows one after the other."""
    x, rows, step = arguments["input"], geometry.sizes[0], geometry.stride[0]
    span = geometry.dilation[0] * (geometry.kernel[0] - 1) + 1
    out: Tensor = x.new_empty(len(x), len(arguments["weight"]), *geometry.sizes)
    tall = geometry.tall(x)
    arguments |= {"padding": [0, *geometry.padding[1:]]}
    for samples in _pieces(len(x), COLUMNS // (row * rows)):
        for band in _pieces(rows, COLUMNS // row):
            under = slice(band.start * step, (band.stop - 1) * step + span)
            out[samples, :, band] = func(**arguments | {"input": tall[samples, :, under]})
    return out


def _pieces(size: int, most: int) -> Iterator[slice]:
    """Split a dimension evenly into pieces of at most ``most`` entries, and at least one."""
    count = -(-size // max(most, 1))
    length = -(-size // count)
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


def _summed(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
    """Sum shifted images over the kernel entries, a few channels at a time."""
    out: Tensor = x.new_empty(len(x), len(weight), *geometry.sizes)
    shape, whole = [-1] + [1] * len(geometry.kernel), (slice(None), slice(None))
    sides = [
        [geometry.under(place, dim, x.size(2 + dim)) for place in range(size)]
        for dim, size in enumerate(geometry.kernel)
    ]
    most = _PICTURES // max(x[:, :1].numel() * torch.float64.itemsize, 1)
    for channels in _pieces(len(weight), most):
        sums, pictures = out[:, channels], x[:, channels]
        sums.copy_(x.new_zeros(1) if bias is None else bias[channels].view(shape))
        for place, factors in zip(itertools.product(*sides), weight[channels].flatten(1).unbind(1), strict=True):
            to, met = zip(*place, strict=True)
            sums[whole + to].addcmul_(pictures[whole + met], factors.view(shape))
    return out
