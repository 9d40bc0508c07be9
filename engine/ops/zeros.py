"""Large products and convolutions in float64, skipping what masks have zeroed.

Of a masked layer, whole rows and columns of the weight are zero, and so are the channels that it reads from another
such layer. They add zero, provided that nothing is infinite or NaN: leaving them out gives the same sums, in a quarter
of the time if half of the channels are masked. Zeros are determined from the numbers, at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.ops import convolving
from engine.program.signature import signature
from engine.running.recomputed import RecomputedTensor

__all__ = ["in_float64"]

_LARGE = 2**22
"""Multiplications below which looking for zeros takes as long as they do."""

_REPEATED = 32
"""Multiplications per number that is read below which the same holds: a few rows times a large weight."""

_WORTH = 0.75
"""The share of the multiplications above which all are carried out."""

_LINEAR = (torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
_CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)


def in_float64(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Compute a large product or convolution in float64 without the rows and columns that are zero.

    Args:
        func: overload of an op.
        args, kwargs: its arguments.

    Returns:
        The result of the op, or None if there is little to leave out.

    Example:
        >>> x, weight = torch.rand(512, 128).double(), torch.rand(128, 128).double()
        >>> weight[::2] = 0
        >>> output = in_float64(torch.ops.aten.linear.default, (x, weight), {})
        >>> torch.testing.assert_close(output, x @ weight.T)
        >>> in_float64(torch.ops.aten.linear.default, (x, weight + 1), {}) is None
        True
    """
    if func in _LINEAR:
        return _product(func, signature(func).bind(tuple(args), kwargs))
    return _convolution(func, signature(func).bind(tuple(args), kwargs)) if func in _CONVOLUTIONS else None


def _product(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor | None:
    if func is torch.ops.aten.linear.default:
        x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
        if not _is_plain(x, weight) or weight.ndim != 2 or x.ndim < 2 or _is_small(x, weight, len(weight)):
            return None
        rows = _reduced(x.reshape(-1, x.size(-1)), weight, bias, transposed=True)
        return None if rows is None else rows.view(*x.shape[:-1], len(weight))
    left, right, bias = arguments.get("mat1", arguments["self"]), arguments["mat2"], None
    if func is torch.ops.aten.addmm.default:
        bias = arguments["self"]
        if arguments["beta"] != 1 or arguments["alpha"] != 1:
            return None
    if not _is_plain(left, right) or _is_small(left, right, right.size(1)):
        return None
    return _reduced(left, right, bias, transposed=False)


def _is_small(left: Tensor, right: Tensor, columns: int) -> bool:
    """Whether a product takes no longer than looking for zeros in it."""
    return left.numel() * columns < max(_LARGE, _REPEATED * (left.numel() + right.numel()))


def _is_plain(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float64 and t.device.type == "cpu" and t.layout is torch.strided for t in tensors)


def _read(tensor: Tensor) -> Tensor:
    return tensor.materialized() if isinstance(tensor, RecomputedTensor) else tensor


def _summary(tensor: Tensor, summarize: Callable[[Tensor], Tensor]) -> Tensor:
    return tensor.summary(summarize) if isinstance(tensor, RecomputedTensor) else summarize(tensor)


def _part(tensor: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the remaining part of a weight along its first two dimensions."""
    if isinstance(tensor, RecomputedTensor):
        return tensor.part(first.nonzero()[:, 0], second.nonzero()[:, 0])
    return _cut(_cut(tensor, 0, first), 1, second)


def _reduced(left: Tensor, right: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
    """Multiply two matrices without zero rows, columns and summands, and add a bias; None if few are zero."""
    if not (_may_hold_zeros(left) and _may_hold_zeros(right)):
        return None
    sums = [_summary(m, _by_rows_and_columns).split(list(m.shape)) for m in (left, right)]
    (rows, inner), (first, second) = sums
    others, columns = (second, first) if transposed else (first, second)
    kept = [rows.bool(), inner.bool() & others.bool(), columns.bool()]
    if _share(*kept) > _WORTH or not _is_finite(rows, columns):
        return None
    factor = _part(right, kept[2], kept[1]).t() if transposed else _part(right, kept[1], kept[2])
    out = _spread(_spread(_part(left, kept[0], kept[1]) @ factor, 0, kept[0]), 1, kept[2])
    return out if bias is None else out.add_(_read(bias))


def _by_rows_and_columns(matrix: Tensor) -> Tensor:
    magnitudes = matrix.abs()
    return torch.cat([magnitudes.sum(1), magnitudes.sum(0)])


def _may_hold_zeros(tensor: Tensor) -> bool:
    return not isinstance(tensor, RecomputedTensor) or tensor.has_parts


def _share(*kept: Tensor) -> float:
    return math.prod(float(mask.sum()) / max(len(mask), 1) for mask in kept)


def _is_finite(*tensors: Tensor) -> bool:
    """Whether no entry is infinite or NaN; a sum that overflows counts as infinite."""
    return all(math.isfinite(float(t.sum())) for t in tensors)


def _cut(tensor: Tensor, dim: int, kept: Tensor) -> Tensor:
    """Return the remaining entries along a dimension."""
    return tensor if bool(kept.all()) else tensor.index_select(dim, kept.nonzero()[:, 0])


def _spread(tensor: Tensor, dim: int, kept: Tensor) -> Tensor:
    """Insert zeros for the entries that were left out."""
    if bool(kept.all()):
        return tensor
    shape = [len(kept) if d == dim else n for d, n in enumerate(tensor.shape)]
    return tensor.new_zeros(shape).index_copy_(dim, kept.nonzero()[:, 0], tensor)


def _convolution(func: Callable[..., Any], arguments: dict[str, Any]) -> Tensor | None:
    x, stand_in, bias, groups = (arguments[name] for name in ("input", "weight", "bias", "groups"))
    alike = _is_plain(x, stand_in) and x.ndim == stand_in.ndim and x.is_contiguous() and x.numel() > 0
    depthwise = alike and groups == x.size(1) == len(stand_in) > 1
    if not alike or not (depthwise or groups == 1):
        return None
    if x.numel() * math.prod(stand_in.shape) < _LARGE * stand_in.size(1) * groups:
        return None
    dims = tuple(range(2, x.ndim))
    if not _may_hold_zeros(stand_in):
        return None
    entries, pictures = _summary(stand_in, lambda weight: weight.abs().flatten(2).sum(2)), x.abs().sum((0, *dims))
    outputs, inputs = entries.any(1), pictures.bool()
    inputs = inputs & (outputs if depthwise else entries.any(0))
    outputs = inputs if depthwise else outputs
    share = _share(outputs) if depthwise else _share(outputs, inputs)
    if not 0 < share <= _WORTH or not _is_finite(entries, pictures):
        return None
    reduced = arguments | {
        "input": _cut(x, 1, inputs),
        "weight": _part(stand_in, outputs, torch.ones(1, dtype=torch.bool) if depthwise else inputs),
        "bias": None,
        "groups": int(inputs.sum()) if depthwise else 1,
    }
    out = convolving.in_float64(func, tuple(reduced.values()), {})
    out = _spread(func(**reduced) if out is None else out, 1, outputs)
    return out if bias is None else out.add_(_read(bias).view(-1, *[1] * len(dims)))
