"""Tensors created from one number, or uninitialised, with the size of another tensor or with a size that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import size_demands, through
from engine.program.arrays import align
from engine.program.graph import Node, Value
from engine.rule import Demand, Rare, Rule, Sample, Shapes

__all__ = ["OF_ONE_NUMBER", "RULES"]


def _filled(node: Node, constants: Constants) -> Sequence[Tensor]:
    fill = node.args.get("value", node.args.get("fill_value", 1.0 if "ones" in node.op else 0.0))
    if isinstance(fill, Value):
        return [align(constants.plain(fill), node.output.ndim)]
    return [torch.full([1] * node.output.ndim, float(fill), dtype=torch.float64)]


def _like_labels(node: Node, labels: Labels) -> None:
    labels.claim(node.inputs[0])
    labels.pass_on(node.inputs[0], node.output)


def _unused(node: Node, use: Use) -> None:
    """The input only lends its shape; a fill value is used."""
    for value in node.inputs[1:]:
        use.add_all(value)


def _factory_labels(node: Node, labels: Labels) -> None:
    """A tensor created with a size that follows from a shape adopts the slots of the tensors it meets."""
    for layer in labels.fresh(node.output, range(node.output.ndim)):
        labels.add(node.output, layer)


def _sized(node: Node, kept: Callable[[Value, int], Tensor | None], shapes: Shapes) -> Iterable[Demand]:
    return size_demands("size", node, shapes)


def _constant_tensors(x: Tensor) -> Tensor:
    constant = torch.zeros(x.shape) + torch.ones(x.shape) + torch.full(x.shape, 0.5) + torch.full_like(x, 0.5)
    constant = constant.to(x) + x.new_zeros(x.shape) + x.new_full(x.shape, 0.25) + torch.ones_like(x)
    return torch.multiply(x, constant) + (x * 1).zero_()


def _written_later(x: Tensor) -> Tensor:
    like, new = torch.empty_like(x), x.new_empty(x.shape) + torch.empty(x.shape).to(x)
    like.copy_(x)
    new[:, :, :2], new[:, :, 2:] = x[:, :, :2], 1.0
    return like + new


def _samples() -> Iterable[Sample]:
    yield through("tensors of one number", _constant_tensors)
    yield through("filled", lambda x: x + torch.zeros_like(x).fill_(2.0) * x.new_ones(x.shape[1], 1, 1))
    yield through("written later", _written_later)


RULES = [
    Rule(("fill", "zero", "zeros_like", "ones_like", "full_like"), _like_labels, _filled, _unused, samples=_samples),
    Rule(
        ("new_full", "new_ones", "new_zeros", "full", "ones", "zeros"),
        _factory_labels,
        _filled,
        _unused,
        demands=_sized,
        rare=Rare(lends=True),
    ),
    Rule(("empty_like",), _like_labels, use=_unused),  # uninitialised memory varies; it is written later
    Rule(("new_empty", "empty"), _factory_labels, use=_unused, demands=_sized, rare=Rare(lends=True)),
]

OF_ONE_NUMBER = frozenset(op for rule in RULES if rule.constants is _filled for op in rule.ops)
"""Ops that give a tensor of one number, and read no more than the shape of another."""
