"""Ops that sort, rank or accumulate along a dimension: sort, topk, nms, cumsum.

The dimension is frozen, since each entry of the result depends on the others; all other dimensions propagate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.pointwise import broadcast_labels
from engine.ops.shape import through
from engine.program.arrays import uniform, zero_where
from engine.program.graph import Node
from engine.rule import Rule, Sample

__all__ = ["RULES"]

_SORTED = "argsort cummax cummin logcumsumexp msort sort topk".split()  # the dimension keeps its size, or is shortened
_RUNNING = "cumprod cumsum".split()  # zero where all entries are zero
_CHOSEN = "argmax argmin kthvalue max median min mode nanmedian".split()  # reduces the dimension to one entry


def _axis(node: Node) -> int | None:
    """The dimension; None for all."""
    dim = node.args.get("dim", 0 if node.op == "msort" else None)
    return None if dim is None else dim % node.inputs[0].ndim


def _dropped(node: Node, array: Tensor) -> Tensor:
    dim = _axis(node)
    if dim is None:
        return array.reshape([1] * node.outputs[0].ndim)
    return array.squeeze(dim) if node.op in _CHOSEN and not node.args.get("keepdim") else array


def _labels(node: Node, labels: Labels) -> None:
    source, dim = node.inputs[0], _axis(node)
    if len(node.inputs) > 1:  # element-wise maximum of two tensors
        broadcast_labels(node, labels)
        return
    labels.claim(source)
    dims = list(range(source.ndim)) if dim is None else [dim]
    for layer in labels.without(source, dims, f"{node!r} puts it in order"):
        for value in node.outputs:
            labels.add(value, _dropped(node, layer))


_PLACES = ("argmax", "argmin", "argsort")  # return positions of entries: for equal ones, these depend on the device


def _constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Equal entries stay what they are, in any order; which of them is the first is unknown."""
    if len(node.inputs) > 1 or node.op in _PLACES or node.op == "logcumsumexp":
        return None
    dim, source = _axis(node), node.inputs[0]
    array = uniform(constants.plain(source), list(range(source.ndim)) if dim is None else [dim])
    places = [torch.full([1] * value.ndim, math.nan, dtype=torch.float64) for value in node.outputs[1:]]
    return [_dropped(node, array), *places]


def _running(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Zero where all accumulated entries are zero."""
    zero = (constants[node.inputs[0]] == 0).all(_axis(node) or 0, keepdim=True)
    return [zero_where(zero)]


def _use(node: Node, use: Use) -> None:
    source, dim = node.inputs[0], _axis(node)
    if len(node.inputs) > 1:
        for value in node.inputs:
            use.add(value, use[node.output])
        return
    if dim is None:
        use.add_all(source)
        return
    for value in node.outputs:
        used = use[value]
        if node.op in _CHOSEN and not node.args.get("keepdim"):
            used = used.unsqueeze(dim)
        use.add(source, used.any(dim, keepdim=True))


def _orders(x: Tensor) -> Tensor:
    places = x.argsort(2) + x.flip(2).msort().argmin(2, keepdim=True)
    running = torch.cummax(x, 3)[0] + torch.cummin(x, 3)[0] + torch.logcumsumexp(x, 2)
    few = torch.kthvalue(x, 2, 2)[0] + x.min(2)[0] + x.mode(2)[0] + x.nanmedian(2)[0]
    return running + few[:, :, None] + places.to(x)


def _running_samples() -> Iterable[Sample]:
    yield through("running sum over positions", lambda x: x.cumsum(2) + x.relu().cumprod(3))
    yield through("running sum over channels", lambda x: x.cumsum(1))


def _samples() -> Iterable[Sample]:
    yield through("sorted positions", lambda x: x.sort(2)[0])
    yield through("largest positions", lambda x: x.topk(2, 3)[0])
    yield through("largest position", lambda x: x.max(2, keepdim=True)[0])
    yield through("median position", lambda x: x.median(2)[0][:, :, None])
    yield through("which position", lambda x: x.argmax(3, keepdim=True).to(x.dtype))
    yield through("sorted channels", lambda x: x.sort(1)[0])
    yield through("largest of all", lambda x: x * x.max())
    yield through("other orders", _orders)
    yield through("larger of two", lambda x: torch.max(x, x.flip(2)))


def _suppressed(node: Node, labels: Labels) -> None:
    for value in node.inputs:
        labels.freeze(value, f"{node!r} compares it")


RULES = [
    Rule((*_SORTED, *_CHOSEN), _labels, _constants, _use, elementwise=1, samples=_samples),
    Rule(tuple(_RUNNING), _labels, _running, _use, elementwise=1, samples=_running_samples),
    Rule(("torchvision::nms",), _suppressed),
]
