"""Run a recorded program on a batch, node by node, with any parameters; callers can inspect values in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engine.compensation.weights import Weights
from engine.errors import InputError
from engine.numbers.sizes import numbers_in
from engine.program.dtensors import has_shards, precision, whole
from engine.program.expressions import AttributeOf, evaluate
from engine.program.graph import Graph, Node, Value, walk_values
from engine.program.trees import map_tensors, tensors_in
from engine.recording.recorder import MODULE
from engine.recording.versions import WRITE
from engine.running.inputs import call_model
from engine.running.tensor_backup import unwritten
from engine.surgery.kinds.norms import WideNorm, wide_norms

__all__ = ["Run", "advance", "check_program", "first_path"]


def first_path(graph: Graph) -> list[Node]:
    """Return the nodes that ran in eval mode on the example input, in order."""
    return [node for node in graph.nodes if node.path == "eval"]


class Run:
    """Execution of the program on one batch.

    A value is freed once the last node that reads it has run, unless it is held.

    Args:
        graph: the recorded program.
        stored: parameters and buffers by canonical name, read at each use.
        inputs: the tensors of the batch, in the order of the example.
        held: indices of values to keep, with the number of calls of `release` after which they are freed.
        norms: norms of the model whose statistics span more channels than in the program.

    Example:
        >>> import engine
        >>> net = nn.Linear(3, 2)
        >>> graph = engine.trace(net, torch.zeros(4, 3))
        >>> run = Run(graph, dict(net.named_parameters()), [torch.ones(5, 3)])
        >>> [node] = first_path(graph)
        >>> run.step(node)
        >>> torch.equal(run[node.output], net(torch.ones(5, 3)))
        True
    """

    def __init__(
        self,
        graph: Graph,
        stored: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        held: Mapping[int, int] | None = None,
        norms: Mapping[str, WideNorm] | None = None,
    ) -> None:
        examples = graph.inputs[: len(inputs)]
        if len(inputs) != len(list(tensors_in((graph.args, graph.kwargs)))):
            raise InputError(f"The batch contains {len(inputs)} tensors, but the example {len(examples)}.")
        self._graph, self._stored, self._norms = graph, stored, norms or {}
        # a model may write to its input in place
        self._tensors: dict[int, Tensor] = {v.index: t.clone() for v, t in zip(examples, inputs, strict=True)}
        self._shapes: dict[int, tuple[int, ...]] = {index: tuple(t.shape) for index, t in self._tensors.items()}
        self._readers = Counter(v.index for node in first_path(graph) for v in node.inputs)
        self._readers.update(held or {})
        self._done: set[int] = set()

    def __getitem__(self, value: Value) -> Tensor:
        """Return the tensor of a computed or stored value."""
        if value.name is not None:
            return self._stored[value.name]
        return value.data if value.data is not None else self._tensors[value.index]

    def __contains__(self, value: Value) -> bool:
        return value.name is not None or value.data is not None or value.index in self._tensors

    def release(self, value: Value) -> None:
        """Free a value once no reader remains."""
        self._readers[value.index] -= 1
        if self._readers[value.index] <= 0:
            self._tensors.pop(value.index, None)

    def step(self, node: Node) -> None:
        """Run a node, if it has not run yet, and free values without further readers."""
        if node.index in self._done:
            return
        self._done.add(node.index)
        outputs = self._outputs(node)
        for value, tensor in zip(node.outputs, outputs, strict=True):
            self._shapes[value.index] = tuple(tensor.shape)
            if self._readers[value.index] > 0 or value in self._graph.outputs:
                self._tensors[value.index] = tensor
        for value in node.inputs:
            self.release(value)

    def __copy__(self) -> Run:
        """Return an independent run in the same state, as long as neither runs nodes that write in place."""
        other = object.__new__(Run)
        vars(other).update(vars(self), _tensors=dict(self._tensors), _shapes=dict(self._shapes))
        other._readers, other._done = self._readers.copy(), set(self._done)
        return other

    def _outputs(self, node: Node) -> list[Tensor]:
        if node.op == WRITE:
            base = self[node.args["self"]]
            if not node.args["chain"]:  # a view shares this memory, so that its write has already happened
                base.copy_(self[node.args["src"]])
            return [base]
        if node.op == MODULE:
            raise InputError(f"{node.module!r} is replaced as a whole, so its inputs cannot be compensated.")
        arguments, norm = self.arguments(node), self._norms.get(node.module)
        wide = None if norm is None else norm.run(node.op, arguments)
        out = node.target(**arguments) if wide is None else wide
        schema = node.target._schema
        written = [self[v] for v in walk_values([node.args[a.name] for a in schema.arguments if _is_written(a)])]
        fresh = [t for t in tensors_in(out) if not any(t is w for w in written)]
        return [*written, *fresh]

    def arguments(self, node: Node) -> dict[str, Any]:
        """Return the arguments of a node for this batch, with tensors instead of values and evaluated sizes.

        Raises:
            InputError: if it reads a tensor that an earlier call of the model left behind.
        """
        if not all(value in self for value in node.inputs):
            raise InputError(
                f"{node!r} reads a tensor that the model keeps from one call to the next, which its recorded program "
                "cannot compute for other data. Empty the cache (many models do when `train()` is called), and trace "
                "the model again."
            )
        tree = {name: self._sized(node, name, argument) for name, argument in node.args.items()}
        return {name: _filled(argument, self) for name, argument in tree.items()}

    def _sized(self, node: Node, name: str, argument: Any) -> Any:
        places = [place for key, place in node.sizes if key == name]
        if not places:
            return argument
        numbers = numbers_in(argument)
        for place in places:
            numbers[place] = evaluate(
                node.sizes[name, place], lambda v: self._shapes.get(v.index, v.shape), self._attribute
            )
        return numbers if isinstance(argument, (list, tuple)) else numbers[0]

    def _attribute(self, attribute: AttributeOf) -> int:
        return self._graph.attributes[attribute.module][attribute.name]


def advance(runs: Sequence[Run], nodes: Iterable[Node], stored: Weights) -> None:
    """Run nodes on all batches, node by node.

    Args:
        runs: runs of the batches, which read the weights.
        nodes: nodes in order.
        stored: the weights.
    """
    for node in nodes:
        with stored.at(node):
            for run in runs:
                run.step(node)


def check_program(model: nn.Module, graph: Graph, stored: Weights, batch: Sequence[Tensor]) -> None:
    """Check that the recorded program and the model compute the same, on two samples.

    Args:
        model: the model, in eval mode.
        graph: its graph.
        stored: its parameters and buffers by canonical name.
        batch: tensors in the order of the example.

    Raises:
        InputError: if they differ, because the code depends on the size of the batch, for example.
    """
    tensors = [tensor[:2] if tensor.ndim else tensor for tensor in batch]
    wanted = iter(tensors)
    args, kwargs = (map_tensors(tree, lambda _: next(wanted)) for tree in (graph.args, dict(graph.kwargs)))
    with nullcontext() if has_shards(model) else unwritten(model):  # the program starts from the same state
        expected = [whole(tensor).clone() for tensor in tensors_in(call_model(model, args, kwargs, batch=True))]
    run = Run(graph, stored, tensors, norms=wide_norms(model))
    advance([run], first_path(graph), stored)
    outputs = [run[value] for value in graph.outputs if value in run]
    rounding = torch.finfo(precision(model)).eps if has_shards(model) else 0.0
    if not all(any(_agree(one, other, rounding) for other in outputs) for one in expected):
        raise InputError(
            f"The recorded program of {type(model).__name__} and the model differ in their outputs for these batches: "
            "the code depends on sizes or values of the batch. Trace it with an example like the batches."
        )


def _agree(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether outputs agree; FSDP2 may run a model in lower precision than that of its parameters."""
    if one.shape != other.shape or (one.dtype != other.dtype and not rounding):
        return False
    tolerance = max(1e-5, 16 * rounding) * float(one.abs().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, other.to(one), rtol=1e-3, atol=tolerance))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _filled(tree: Any, run: Run) -> Any:
    if isinstance(tree, Value):
        return run[tree]
    if isinstance(tree, (list, tuple)):
        return type(tree)(_filled(item, run) for item in tree)
    return {key: _filled(item, run) for key, item in tree.items()} if isinstance(tree, Mapping) else tree
