"""Ops that join tensors: cat and stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.slots import FROZEN
from engine.analysis.use import Use
from engine.ops.samples import Apply, chain
from engine.program.arrays import support, uniform
from engine.program.graph import Node, Value
from engine.rule import Rule, Sample

__all__ = ["RULES"]


def _dim(node: Node) -> int:
    dim: int = node.args["dim"]
    return dim % node.output.ndim


def _parts(node: Node) -> list[Value]:
    """The joined tensors; `cat` skips empty ones of rank 1."""
    ndim = node.output.ndim
    return [v for v in node.args["tensors"] if node.op == "stack" or v.ndim == ndim]


def _part(node: Node, value: Value, array: Tensor) -> Tensor:
    """Unsqueeze the new dimension of a stacked tensor."""
    return array.unsqueeze(_dim(node)) if node.op == "stack" else array


def _labels(node: Node, labels: Labels) -> None:
    """Concatenate slots along the joined dimension; tie them along all others."""
    dim, target, parts = _dim(node), node.output, _parts(node)
    for value in parts:
        labels.claim(value)
    empty = [] if node.op == "stack" else [v for v in parts if not v.shape[dim]]
    parts = [v for v in parts if v not in empty]
    layers = [[_part(node, v, layer) for layer in labels.layers(v)] for v in parts]
    supports = {support(layer) for each in layers for layer in each}
    for touched in sorted(t for t in supports if dim not in t):
        fixed = torch.full([target.shape[d] if d in touched else 1 for d in range(target.ndim)], FROZEN)
        for each in layers:
            labels.add(target, _rows(each, touched, fixed, labels))
    for layer in (layer for value in empty for layer in labels.layers(value)):
        _agree(layer, [other for each in layers for other in each], labels)
    joint = {d for t in supports if dim in t for d in t}
    if joint:
        pieces = [_piece(v, each, joint, dim, target.ndim) for v, each in zip(parts, layers, strict=True)]
        labels.add(target, torch.cat(pieces, dim))


def _rows(layers: Sequence[Tensor], touched: tuple[int, ...], fixed: Tensor, labels: Labels) -> Tensor:
    """One part's labels over some dimensions; where they span further dimensions, tied into whole rows (heads)."""
    for layer in layers:
        if support(layer) == touched:
            return layer
    for layer in layers:
        if set(touched) < set(support(layer)):
            return labels.tie(layer, [d for d in support(layer) if d not in touched])
    return fixed


def _agree(layer: Tensor, others: Iterable[Tensor], labels: Labels) -> None:
    """Tie a part that is empty along the joined dimension to the others along the remaining dimensions."""
    touched = support(layer)
    met = [other for other in others if set(touched) <= set(support(other))]
    for other in met:
        for dim in set(support(other)) - set(touched):
            other = other.narrow(dim, 0, 1)
        labels.slots.union(layer, other)
    if not met:
        labels.slots.freeze(layer, "is joined with a tensor of fixed size")


def _piece(value: Value, layers: Sequence[Tensor], joint: set[int], dim: int, ndim: int) -> Tensor:
    """One part's labels over the joint dimensions; frozen for a part without labels."""
    shape = [value.shape[d] if d in joint else 1 for d in range(ndim)]
    joint_layers = [layer for layer in layers if layer.size(dim) > 1]
    joint_layers += [
        layer for layer in layers if layer.size(dim) == 1 and support(layer) and set(support(layer)) <= joint
    ]
    return joint_layers[0].expand(shape) if joint_layers else torch.full(shape, FROZEN)


def _constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    dim, parts = _dim(node), _parts(node)
    arrays = [_part(node, v, constants.plain(v)) for v in parts]
    shape = [max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True)]
    pieces = []
    for value, array in zip(parts, arrays, strict=True):
        shape[dim] = 1 if node.op == "stack" else value.shape[dim]
        pieces.append(array.expand(shape))
    joined = torch.cat(pieces, dim)
    for value, array in zip(parts, arrays, strict=True):
        if _may_have_some(node, value, array, constants):
            joined = torch.where(joined == uniform(array, [dim]), joined, math.nan)
    return [joined]


def _may_have_some(node: Node, value: Value, array: Tensor, constants: Constants) -> bool:
    """Whether a part is empty at the example's size but need not be at another."""
    dim = _dim(node)
    empty = node.op == "cat" and not value.shape[dim] and array.size(dim) > 0
    return empty and not constants.amounts.is_channel(node.output, dim)


def _use(node: Node, use: Use) -> None:
    dim, used, start = _dim(node), use[node.output], 0
    for value in _parts(node):
        size = 1 if node.op == "stack" else value.shape[dim]
        if not size:
            if used.size(dim) == 1:  # it may be nonempty at another size
                use.add(value, used)
            continue
        part = used if used.size(dim) == 1 else used.narrow(dim, start, size)
        use.add(value, part.any(dim) if node.op == "stack" else part)
        start += size


def _samples() -> Iterable[Sample]:
    def joined(name: str, f: Callable[..., Tensor], after: int) -> Sample:
        def make() -> nn.Module:
            two = Apply(f, nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, padding=1))
            return chain(two, nn.Conv2d(after, 4, 3, padding=1))

        return Sample(make, (2, 3, 6, 6), name)

    yield joined("cat channels", lambda x, y: torch.cat([x, y], 1), 16)
    yield joined("cat positions", lambda x, y: torch.cat([x, y], 2), 8)
    yield joined(
        "cat with a constant",
        lambda x, y: torch.cat([x, torch.ones(1, 2, 1, 1).to(x).expand(len(x), 2, *x.shape[2:]), y], 1),
        18,
    )
    yield joined("stack and sum", lambda x, y: torch.stack([x, y], 1).sum(1), 8)
    yield joined("stack and flatten", lambda x, y: torch.stack([x, y], 2).flatten(1, 2), 16)


RULES = [Rule(("cat", "stack"), _labels, _constants, _use, samples=_samples)]
