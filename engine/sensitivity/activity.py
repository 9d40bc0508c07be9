"""Measure how active each unit is: one evaluation of the model, observed at the inputs of its contractions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import TraceError
from engine.groups import Group, units_at
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node, Value
from engine.program.signature import signature
from engine.removal.propagate import Structure
from engine.removal.structure import structure_of
from engine.rule import Registry
from engine.running.evaluation import evaluating
from engine.running.inputs import call_model
from engine.sensitivity.importance import unit_sums
from engine.surgery.kinds.attention import headwise

__all__ = ["Activity", "ActivityMeter"]


@dataclass(frozen=True, eq=False)
class Activity:
    """Sums over all consumers, samples and positions, each of shape ``(size,)``, by group name.

    Attributes:
        count: number of observed values per unit.
        positive: number of values greater than 0.
        magnitude: sum of absolute values.
    """

    count: Mapping[str, Tensor]
    positive: Mapping[str, Tensor]
    magnitude: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class _Reader:
    """A contraction: name and channel dimension of its input, and the unit at each position per group, -1 for none."""

    node: Node
    argument: str
    dim: int
    units: Mapping[str, Tensor]


class ActivityMeter:
    """Measures the inputs of contractions, after activations and norms, including functional calls.

    Args:
        graph: graph of the model.
        groups: dependency groups from the same graph.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Example:
        >>> import engine
        >>> net, x = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)), torch.ones(4, 1)
        >>> _ = net[0].weight.data.copy_(torch.tensor([[1.0], [-1.0]])), net[0].bias.data.zero_()
        >>> graph = engine.trace(net, x)
        >>> activity = ActivityMeter(graph, engine.dependency_groups(net, x, graph=graph)[:1])(net, (x,))
        >>> activity.positive["0"], activity.magnitude["0"]
        (tensor([4., 0.], dtype=torch.float64), tensor([4., 0.], dtype=torch.float64))
    """

    def __init__(self, graph: Graph, groups: Iterable[Group], *, rules: Registry | None = None) -> None:
        structure = structure_of(graph, rules)
        self.groups = list(groups)
        self._opaque = graph.opaque
        self._readers = []
        for node, c in _readers(structure):
            slots = structure.along(c.input, c.input_dim)
            if node.path == "eval":
                units = {} if slots is None or c.depthwise else units_at(slots, self.groups)
                self._readers.append(_Reader(node, _argument(node, c.input), c.input_dim, units))

    @property
    def measured(self) -> set[str]:
        """Names of the groups that a contraction reads; other groups are not measured."""
        return {name for reader in self._readers for name in reader.units}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Activity:
        """Evaluate the model once in eval mode, without changing the model or the random state.

        Args:
            model: model of the graph.
            args, kwargs: arguments of its forward.

        Raises:
            TraceError: if the model executes other contractions than with the example input.
        """
        sizes = {group.name: group.size for group in self.groups if group.name in self.measured}
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        sums = {name: torch.zeros(3, size, dtype=torch.float64, device=device) for name, size in sizes.items()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # a forward may write to them
        watch = _Watch(self._readers, sums)
        with evaluating(model), headwise(model), torch.inference_mode(), watch:
            torch.func.functional_call(
                _Call(model), {f"model.{n}": b for n, b in buffers.items()}, (args, kwargs or {})
            )
        if watch.waiting:
            raise TraceError(
                f"With this batch {type(model).__name__} takes another path through its code than with the example "
                f"input: {watch.waiting[-1].node!r} is not reached, so what its channels carry cannot be measured."
            )
        return Activity(*({name: total[row] for name, total in sums.items()} for row in range(3)))


def _readers(structure: Structure) -> Iterator[tuple[Node, Contraction]]:
    """Yield the first contraction of each node, which reads the node's input; inner ones are not observed."""
    last: Node | None = None
    for node, c in structure.contractions():
        if node is not last:
            yield node, c
        last = node


def _argument(node: Node, value: Value) -> str:
    return next(name for name, argument in node.args.items() if argument is value)


class _Call(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return call_model(self.model, args, kwargs)


class _Watch(TorchDispatchMode):
    """Accumulates the inputs of readers, whose ops are called in the order of the graph."""

    def __init__(self, readers: list[_Reader], sums: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums = sums
        self.waiting = list(reversed(readers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and record its input if it is the next reader."""
        op_signature = signature(func)
        reader = self.waiting[-1] if self.waiting else None
        if reader is not None and reader.node.op == op_signature.op:
            self.waiting.pop()
            self._add(reader, op_signature.bind(args, kwargs or {})[reader.argument])
        return func(*args, **(kwargs or {}))

    def _add(self, reader: _Reader, activations: Tensor) -> None:
        if not reader.units:
            return
        rows = activations.movedim(reader.dim, -1).flatten(0, -2).float()
        seen = torch.stack([torch.full_like(rows[0], len(rows)), (rows > 0).sum(0), rows.abs().sum(0)]).double()
        for name, units in reader.units.items():
            size = self._sums[name].shape[1]
            self._sums[name].add_(torch.stack([unit_sums(row, units, size) for row in seen]))
