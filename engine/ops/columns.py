"""Unfolded inputs of a contraction: the entries under the kernel at each output position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.program.contraction import Contraction
from engine.program.graph import Node

__all__ = ["columns", "columns_at", "has_columns"]

_MOST = 2**24  # entries that are laid out at a time

_KERNELS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")


def has_columns(node: Node, c: Contraction) -> bool:
    """Whether `columns` can unfold the input of a contraction."""
    plain = not c.hidden and not c.stacked and c.weight.ndim >= 2
    return plain and (node.op in _KERNELS or c.weight.ndim == 2 and c.groups == 1)


def columns(node: Node, c: Contraction, arguments: Mapping[str, Any]) -> Tensor:
    """Return the entries that multiply the weight, in the order of `Contraction.canonical`.

    Args:
        node: call of a contraction.
        c: description of the contraction.
        arguments: arguments of the call by name, as tensors; each output position becomes a row.

    Returns:
        ``(samples and positions..., groups, inputs * kernel)``, where the leading dimensions are those of the output
        without its channels.
    """
    [name] = [key for key, argument in node.args.items() if argument is c.input]
    entries = arguments[name]
    if node.op not in _KERNELS:
        return entries.movedim(c.input_dim, -1).unsqueeze(-2)
    kernel = c.weight.shape[2:]
    size, channels = math.prod(kernel), entries.size(c.input_dim)
    # A depthwise convolution with one-hot kernels unfolds them, whatever the stride, padding and dilation.
    picks = torch.eye(size, dtype=entries.dtype, device=entries.device).view(size, 1, *kernel)
    picks = torch.cat([picks] * channels)
    if c.transposed:
        picks = picks.view(channels, size, *kernel)
    laid_out = node.target(**{**arguments, "weight": picks, "bias": None, "groups": channels})
    rows = laid_out.movedim(c.output_dim, -1)
    return rows.reshape(*rows.shape[:-1], c.groups, c.inputs * size)


def columns_at(node: Node, c: Contraction, arguments: Mapping[str, Any], places: Tensor) -> Tensor:
    """Return some rows of `columns`, computed for a few samples at a time, as each entry occurs once per kernel entry.

    Args:
        node: a call of a contraction.
        c: how it contracts.
        arguments: its arguments by name, as tensors, the samples first.
        places: positions among all those of the output, ascending by sample, equally many per sample.
    """
    [name] = [key for key, argument in node.args.items() if argument is c.input]
    entries = arguments[name]
    if node.op not in _KERNELS or entries.ndim < c.weight.ndim or len(places) % len(entries):
        return columns(node, c, arguments).flatten(0, -3)[places]
    kernel = math.prod(c.weight.shape[2:])
    step = max(1, _MOST // (kernel * math.prod(entries.shape[1:])))
    each = len(places) // len(entries)
    parts = []
    for start in range(0, len(entries), step):
        rows = columns(node, c, {**arguments, name: entries[start : start + step]}).flatten(0, -3)
        size = len(entries[start : start + step])
        own = places[start * each : (start + size) * each] - start * (len(rows) // size)
        parts.append(rows[own])
    return torch.cat(parts)
