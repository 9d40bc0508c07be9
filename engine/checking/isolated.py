"""Single calls of an op, extracted from a recorded program and run again, in full or with parts cut away."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.compaction.build import canonical_tensors
from engine.program.graph import Graph, Node, Value
from engine.program.signature import signature
from engine.program.storages import storage_of
from engine.program.trees import tensors_in
from engine.recording.versions import WRITE
from engine.rule import Demand
from engine.tracer import trace

__all__ = ["Call", "Tensors", "calls_of", "run", "same_memory"]

Tensors = Mapping[int, Tensor]
"""Data by value index."""


@dataclass(frozen=True, eq=False)
class Call:
    """A single call of an op.

    Attributes:
        graph: a program that consists of this call only, with its own value indices.
        tensors: inputs of the call in the sample, by value index.
        batch: batch size of the sample.
    """

    graph: Graph
    tensors: Tensors
    batch: int

    @property
    def node(self) -> Node:
        """The node of the call."""
        return self.graph.nodes[0]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors that the call reads, each once."""
        return tuple(dict.fromkeys(self.node.inputs))

    @property
    def activations(self) -> tuple[Value, ...]:
        """The inputs produced by other calls, except indices."""
        values = (v for v in self.inputs if not v.stored and v.data is None)
        return tuple(v for v in values if v.dtype.is_floating_point or v.dtype == torch.bool)

    @property
    def stored(self) -> dict[str, Tensor]:
        """The parameters and buffers that the call reads, by name."""
        return {v.name: self.tensors[v.index] for v in self.inputs if v.name is not None}

    def name(self, value: Value) -> str:
        """Return the name of the argument that a value is passed as."""
        for name, argument in self.node.args.items():
            if argument is value:
                return name
            if isinstance(argument, (list, tuple)) and any(item is value for item in argument):
                return f"{name}[{next(i for i, item in enumerate(argument) if item is value)}]"
        return f"input {self.inputs.index(value)}"

    def random(self, generator: torch.Generator) -> dict[int, Tensor]:
        """Return new random activations, with all other inputs as in the sample."""
        tensors = dict(self.tensors)
        for value in self.activations:
            if value.dtype.is_floating_point:
                tensors[value.index] = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(
                    value.dtype
                )
        return tensors


def calls_of(model: nn.Module, example: Tensor, ops: Collection[str], graph: Graph | None = None) -> Iterator[Call]:
    """Yield the calls of some ops that a model makes in eval mode, one for each kind of call.

    Args:
        model: it is only read.
        example: its input, batch first.
        ops: names of the ops.
        graph: a graph of this model, to avoid recording it again.
    """
    graph = trace(model, example) if graph is None else graph
    tensors = _replayed(graph, canonical_tensors(model, graph), example)
    seen: set[str] = set()
    for node in graph.nodes:
        kind = f"{node.op} { {name: _kind(item) for name, item in node.args.items()} }"
        has_tensors = bool(node.outputs) and all(v.index in tensors for v in (*node.outputs, *node.inputs))
        if node.op in ops and has_tensors and kind not in seen:
            seen.add(kind)
            yield _isolated(graph, node, tensors, example.size(0))


def _kind(item: Any) -> Any:
    if isinstance(item, Value):
        return item.shape, item.stored, item.dtype
    return [_kind(each) for each in item] if isinstance(item, (list, tuple)) else repr(item)


def _isolated(graph: Graph, node: Node, tensors: Tensors, batch: int) -> Call:
    inputs = tuple(dict.fromkeys(node.inputs))
    new = {v.index: replace(v, index=i, producer=None, origin=None) for i, v in enumerate(inputs)}
    outputs = tuple(replace(v, index=len(new) + i, producer=0, origin=None) for i, v in enumerate(node.outputs))
    alone = replace(
        node,
        index=0,
        args={name: _mapped(item, new) for name, item in node.args.items()},
        inputs=tuple(new[v.index] for v in node.inputs),
        outputs=outputs,
        sizes={},
    )
    program = replace(
        graph,
        nodes=(alone,),
        values=(*new.values(), *outputs),
        inputs=tuple(v for v in new.values() if not v.stored),
        outputs=(),
        stored={v.name: v for v in new.values() if v.name is not None},
    )
    return Call(program, {new[v.index].index: tensors[v.index] for v in inputs}, batch)


def _mapped(item: Any, new: Mapping[int, Any]) -> Any:
    if isinstance(item, Value):
        return new.get(item.index, item)
    return type(item)(_mapped(each, new) for each in item) if isinstance(item, (list, tuple)) else item


def _replayed(graph: Graph, stored: Mapping[str, Tensor], example: Tensor) -> dict[int, Tensor]:
    """Run a recorded program on real tensors, skipping calls that cannot be run in isolation."""
    tensors = {v.index: stored[name] for name, v in graph.stored.items()}
    tensors.update({v.index: v.data for v in graph.values if v.data is not None})
    tensors.update((v.index, t) for v, t in zip(graph.inputs, tensors_in(example), strict=False))
    generator = torch.Generator().manual_seed(0)
    for value in graph.values:  # inputs that are not constant may hold any numbers
        if value.index not in tensors and value.producer is None and value.dtype.is_floating_point:
            tensors[value.index] = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    for node in graph.nodes:
        runs = node.target is not None or node.op == WRITE
        if node.path == "eval" and runs and all(v.index in tensors for v in node.inputs):
            outputs = run(node, tensors)
            tensors.update((v.index, t) for v, t in zip(node.outputs, outputs, strict=True))
    return tensors


@torch.no_grad()
def run(node: Node, tensors: Tensors, demands: Collection[Demand] = ()) -> list[Tensor]:
    """Run a node.

    Args:
        node: the call.
        tensors: tensors by value index.
        demands: numeric arguments to replace.

    Returns:
        Its outputs, in the order of ``node.outputs``.
    """
    if node.op == WRITE:
        return [_written(node, tensors)]
    args = {name: _mapped(item, tensors) for name, item in node.args.items()}
    for demand in demands:
        name, position = demand.argument
        args[name] = _replaced(args[name], position, demand.wanted)
    written = [name for name in signature(node.target).writes if isinstance(args[name], Tensor)]
    args.update({name: args[name].clone() for name in written})
    schema = node.target._schema.arguments
    positional = [args[a.name] for a in schema if not a.kwarg_only and a.name in args]
    with same_memory(), _same_draws(node):
        outputs = node.target(*positional, **{a.name: args[a.name] for a in schema if a.kwarg_only and a.name in args})
    places = {storage_of(args[name]) for name in written}
    return [*(args[name] for name in written), *(t for t in tensors_in(outputs) if storage_of(t) not in places)]


@contextmanager
def same_memory() -> Iterator[None]:
    """Fill uninitialised memory (`torch.empty_like`) with the same numbers at each call.

    Around many calls it takes the time of one: each `run` does this by itself where nothing around it does.
    """
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before == (True, True) and memory.fill_uninitialized_memory:
        yield
        return
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


@contextmanager
def _same_draws(node: Node) -> Iterator[None]:
    """Let an op that draws random numbers draw the same ones at each call."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _replaced(item: Any, position: int, number: Any) -> Any:
    if not isinstance(item, (list, tuple)):
        return number
    return [number if i == position else each for i, each in enumerate(item)]


def _written(node: Node, tensors: Tensors) -> Tensor:
    base = view = tensors[node.args["self"].index].clone()
    for step, position in node.args["chain"]:
        view = _view(step, view)[position]
    view.copy_(tensors[node.args["src"].index])
    return base


def _view(step: Node, tensor: Tensor) -> list[Tensor]:
    """Return views, not copies."""
    args = [tensor if isinstance(item, Value) else item for item in step.args.values()]
    return list(tensors_in(step.target(*args)))
