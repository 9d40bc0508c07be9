"""Weights that read masked channels, and the targets of their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.ops.columns import has_columns
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node, Value
from engine.program.trees import tensors_in
from engine.removal.keep import Consumer

__all__ = ["Reader", "Sum", "adds", "is_affine", "obstacle", "slope_of", "sum_of", "sums"]


@dataclass(frozen=True, eq=False)
class Sum:
    """The addition of a reader's output to another value.

    Attributes:
        chain: nodes between the reader and the sum; each maps channels by a factor and a shift.
        node: the addition.
        other: the other summand.
        before: nodes that compute the other summand and run after the reader.
    """

    chain: tuple[Node, ...]
    node: Node
    other: Value
    before: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Reader:
    """A call that reads a masked channel.

    Attributes:
        group: the group of the masked channels.
        consumer: the call.
        live: inputs that vary, bool ``(groups, inputs)``.
        sum: the addition of its output to another branch, if there is one.
    """

    group: str
    consumer: Consumer
    live: Tensor
    sum: Sum | None = None

    @property
    def node(self) -> Node:
        """The call."""
        return self.consumer.node

    @property
    def key(self) -> tuple[int, int]:
        """Indices of the call and the weight; a call may have several weights."""
        return self.node.index, self.contraction.weight.index

    @property
    def contraction(self) -> Contraction:
        """The contraction of the call."""
        return self.consumer.contraction


def obstacle(consumer: Consumer, graph: Graph) -> str | None:
    """Return why the weight of a call cannot be fitted, or None.

    Args:
        consumer: the call.
        graph: the program; other recordings, such as a training step, use the weight for the same purpose.
    """
    c = consumer.contraction
    calls = sum(node.path == consumer.node.path for node in graph.readers(c.weight))
    if not c.weight.stored:
        return "its weight is computed from others at each call"
    if calls > 1:
        return f"its weight is read {calls} times"
    if not has_columns(consumer.node, c):
        return f"the inputs of {consumer.node.op} cannot be arranged as a matrix"
    return None


def sums(node: Node, users: dict[int, list[Node]], outputs: set[int]) -> Iterator[tuple[tuple[Node, ...], Node, Value]]:
    """Yield the sum that the output of a node reaches through calls without other inputs, except stored ones."""
    chain: list[Node] = []
    value = node.output
    while value.index not in outputs:
        readers = users.get(value.index, [])
        if len(readers) != 1 or len(readers[0].outputs) != 1:
            return
        [reader] = readers
        others = [v for v in reader.inputs if v is not value and not v.stored]
        if len(others) == 1 and others[0].shape == value.shape == reader.output.shape:
            yield tuple(chain), reader, others[0]
            return
        if others or reader.output.shape != value.shape:
            return
        chain.append(reader)
        value = reader.output


def sum_of(graph: Graph, consumer: Consumer, users: dict[int, list[Node]], stored: Mapping[str, Tensor]) -> Sum | None:
    """Return the addition of a call's output to another branch, if there is one.

    Args:
        graph: the recorded program.
        consumer: the call.
        users: nodes that read each value.
        stored: parameters and buffers by name.
    """
    if consumer.contraction.inner:
        return None
    outputs = {v.index for v in graph.outputs}
    for chain, node, other in sums(consumer.node, users, outputs):
        before = _nodes_behind(graph, other, consumer.node.index, node.index)
        if (
            before is not None
            and adds(node)
            and is_affine(chain, consumer.node.output, consumer.contraction.output_dim, stored)
        ):
            return Sum(chain, node, other, before)
    return None


def _nodes_behind(graph: Graph, value: Value, start: int, stop: int) -> tuple[Node, ...] | None:
    """Return the nodes after ``start`` that compute a value; None if one of them writes in place."""
    needed: dict[int, Node] = {}
    waiting = [value]
    while waiting:
        producer = waiting.pop().producer
        if producer is None or producer <= start or producer in needed:
            continue
        node = graph.nodes[producer]
        if producer >= stop or node.target is None or node.target._schema.is_mutable:
            return None
        needed[producer] = node
        waiting += node.inputs
    return tuple(needed[index] for index in sorted(needed))


def adds(node: Node) -> bool:
    """Test whether a node adds its two inputs that are not stored."""
    values = [v for v in node.inputs if not v.stored]
    generator = torch.Generator().manual_seed(0)
    tensors = {v.index: torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in values}
    out = _call(node, tensors, {})
    expected = tensors[values[0].index] + tensors[values[1].index]
    return isinstance(out, Tensor) and out.shape == node.output.shape and torch.equal(out, expected)


def _call(node: Node, tensors: Mapping[int, Tensor], stored: Mapping[str, Tensor]) -> Any:
    """Run a node on other tensors, with stored tensors in float64."""

    def filled(tree: Any) -> Any:
        if isinstance(tree, Value):
            if tree.index in tensors:
                return tensors[tree.index].clone()
            tensor = stored[tree.name] if tree.name is not None else tree.data
            if tensor is None:
                return None
            return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()
        return type(tree)(filled(item) for item in tree) if isinstance(tree, (list, tuple)) else tree

    return node.target(**{name: filled(argument) for name, argument in node.args.items()})


def _through(chain: Sequence[Node], value: Value, start: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    tensor = start
    for node in chain:
        out = _call(node, {value.index: tensor}, stored)
        tensor, value = next(tensors_in(out)), node.output
    return tensor


def is_affine(chain: Sequence[Node], value: Value, dim: int, stored: Mapping[str, Tensor]) -> bool:
    """Test whether a chain of calls maps each channel, along ``dim``, by a factor and a shift."""
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones_like(noise)
    zero, one, mapped = (_through(chain, value, tensor, stored) for tensor in (0 * ones, ones, noise))
    if mapped.shape != noise.shape:
        return False
    rows = (one - zero).movedim(dim, 0).flatten(1)
    error = (mapped - zero - (one - zero) * noise).abs().max()
    return max(float(error), float((rows - rows[:, :1]).abs().max())) <= 1e-9 * max(float(mapped.abs().max()), 1.0)


def slope_of(at: Sum | None, value: Value, dim: int, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return factor and shift of each channel between the reader and the sum, on the CPU."""
    if at is None or not at.chain:
        return torch.ones(()), torch.zeros(())
    zero = torch.zeros(value.shape, dtype=torch.float64)
    shift, one = (_through(at.chain, value, t, stored).movedim(dim, -1).flatten(0, -2)[0] for t in (zero, zero + 1))
    return one - shift, shift
