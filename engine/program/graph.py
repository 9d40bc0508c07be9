"""The recorded program of a model: plain data, with a consistency check.

A `Value` is a tensor of the program: an input, a parameter or buffer, a captured constant, or the result of a node. A
`Node` is one call of an op. Both are frozen; analyses keep their results in separate tables, keyed by ``Value.index``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine import html
from engine.errors import EngineError, RuleError, StaleGraphError, TraceError
from engine.program.entries import PATHS, TRAIN_PATHS, Entry
from engine.program.stored import stored_tensors

__all__ = ["Graph", "Node", "Origin", "Value", "map_values", "rule_errors", "walk_values"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Origin:
    """The call that derived a value from a single stored one: ``self.weight.T``, or ``self.weight[index]``.

    Attributes:
        op, target, args, inputs: as in `Node`.
    """

    op: str
    target: Any
    args: Mapping[str, Any]
    inputs: tuple[Value, ...]

    @classmethod
    def of(cls, op: str, target: Any, args: Mapping[str, Any], inputs: tuple[Value, ...]) -> Origin | None:
        """Return a call that reads a single stored tensor and otherwise only indices, or None for any other call."""
        alone = inputs and not any(v.dtype.is_floating_point for v in inputs[1:])
        return cls(op, target, args, inputs) if alone and (inputs[0].stored or inputs[0].origin) else None


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the recorded program.

    Attributes:
        index: position in ``graph.values``.
        shape: its sizes for the example input.
        dtype: its dtype.
        name: canonical name of a parameter or registered buffer, else None.
        data: the tensor itself, for a constant that no module registers, else None.
        producer: index of the node that produces it, or None.
        origin: the call that produces it, if that reads a single stored value and otherwise only indices.

    Example:
        >>> import engine
        >>> graph = engine.trace(nn.Linear(3, 2), torch.zeros(5, 3))
        >>> weight = graph.stored["weight"]
        >>> weight, weight.stored, graph.inputs[0].ndim
        (%1:weight[2, 3], True, 2)
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str | None = None
    data: Tensor | None = None
    producer: int | None = None
    origin: Origin | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def stored(self) -> bool:
        """Whether it is a parameter or buffer, which can be narrowed."""
        return self.name is not None

    def __repr__(self) -> str:
        return f"%{self.index}{'' if self.name is None else ':' + self.name}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Node:
    """One call of an op.

    Attributes:
        index: position in ``graph.nodes``.
        op: name of the op without overload and without the underscore of an in-place variant, e.g. ``"relu"``; ops
            outside ``aten`` carry their namespace, e.g. ``"torchvision::nms"``.
        target: the overload that was called.
        args: all arguments by name, including defaults; tensors are `Value`.
        sizes: expressions of numbers among the arguments, by position (``("size", 1)``).
        inputs: the values among the arguments, in order.
        outputs: the values that it produces.
        module: name of the calling module.
        path: ``"eval"``; ``"train"`` for nodes that only run during training (auxiliary heads); ``"other"`` for nodes
            that only run otherwise, at another resolution say, and ``"train, other"`` for those that only run so while
            training; otherwise the name of an entry.
        site: the call in the user's code.
        callers: names of the running modules inside of the model, outermost first. A module that others share has one
            name only, so that its callers say where it runs.

    Example:
        >>> import engine
        >>> graph = engine.trace(nn.Linear(3, 2), torch.zeros(5, 3))
        >>> node = graph.nodes[0]
        >>> node.op, node.output.shape, sorted(node.args)
        ('linear', (5, 2), ['bias', 'input', 'weight'])
    """

    index: int
    op: str
    target: Any
    args: Mapping[str, Any]
    sizes: Mapping[tuple[str, int], Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    module: str
    path: str = "eval"
    site: Any = None
    callers: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """Source file and line of the call in the user's code."""
        return "" if self.site is None else str(self.site)

    @property
    def in_train_mode(self) -> bool:
        """Whether it runs during training only."""
        return self.path in TRAIN_PATHS

    @property
    def in_forward(self) -> bool:
        """Whether the model's forward runs it, and not an entry beside it."""
        return self.path in PATHS

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def __repr__(self) -> str:
        entry = "" if self.in_forward else f" of {self.path!r}"
        place = f" in {self.module!r}" if self.module else entry
        return f"{self.op}{place}{' (' + self.location + ')' if self.location else ''}"


@contextmanager
def rule_errors(node: Node) -> Iterator[None]:
    """Turn an error of a rule on an unexpected call into one that names the call.

    Raises:
        RuleError: for anything but the engine's own errors.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # of any kind: a rule may be the user's
        raise RuleError(
            f"The rule of {node.op!r} fails on {node!r} ({node.target}): {type(error).__name__}: {error}. Put the "
            "module that runs this line in `opaque` of `engine.trace`, which keeps what it reads whole, and report "
            "this."
        ) from error


def walk_values(tree: Any) -> Iterator[Value]:
    """Yield the values in nested lists, tuples and dictionaries, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(item, Value):
                yield item
            elif isinstance(item, (list, tuple, dict)):
                yield from walk_values(item)


def map_values(tree: Any, new: Mapping[int, Value]) -> Any:
    """Return nested lists, tuples and mappings with some values replaced, by index."""
    if isinstance(tree, Value):
        return new.get(tree.index, tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_values(x, new) for x in tree)
    if isinstance(tree, Mapping):
        return {k: map_values(x, new) for k, x in tree.items()}
    return tree


@dataclass(frozen=True, eq=False)
class Graph:
    """The program that a model executes on an example input.

    Attributes:
        nodes: in order of execution, starting with those of the evaluation path.
        values: all values.
        inputs: values of the example inputs.
        outputs: values that the model returns, on all paths, and all others that outlive a run.
        exits: index of an output that no forward returns -> how it leaves the run.
        decisions: places where the code reads numbers from tensors, which may decide what runs afterwards.
        uncertain: node index -> numbers among its arguments that may be others in another call.
        stored: parameters and buffers that the program reads, by canonical name.
        aliases: every name of a parameter or buffer -> its canonical name (tied weights).
        attributes: integer attributes of each module.
        types: class of each module.
        args, kwargs: the example inputs.
        entries: further ways in which the model was run.
        headwise: names of attention modules recorded in a form without fixed sizes.
        spread: layers whose channels differ from those of their consumers -> channel dimension.
        attention: what attention loses when no rules are passed, see `engine.set_attention`.
        spans: name of a narrowed norm -> number of channels that its statistics span.
        explored: whether a larger resolution was recorded as well.
        opaque: names of modules whose internals were not recorded.
        on_data: names of entries recorded with data.
        decided: whether the model was recorded with data, on which its control flow may depend.
        notes: messages about what could not be recorded.
        guards: comparisons of sizes in the model's code, whose outcome must not change.
        written: names of parameters and buffers that are written to while the model runs.
        weights: module and name of each attribute to which a run assigns a tensor derived from parameters and buffers
            only.
        changing: names of buffers whose contents are only known for the recorded call.
        maskable: canonical names of buffers that masks apply to as to parameters: tables that no code writes to.
        constants: names that were declared constant.
        varying: (node index, position) of numeric arguments that differed at another size.
        resized: indices of captured constants that differed at another size.
        unsettled: index of a value that unexecuted code may change entry by entry -> whether zeros stay zero.
        interchangeable: groups of values, by index, of which each may stand in the place of the others.
        whole_along: index of a value -> dimensions that unexecuted code may resize, or that match other tensors.
        dynamic_dims: input dimensions whose sizes vary, as passed to `engine.trace`; None if not given.

    Raises:
        TraceError: by `verify`, if the graph is inconsistent.
        StaleGraphError: by `check_fresh`, for a model whose shapes have changed.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> graph = engine.trace(net, torch.zeros(5, 3))
        >>> [(node.op, node.module) for node in graph.nodes], sorted(graph.stored)
        ([('linear', '0'), ('relu', '1'), ('linear', '2')], ['0.bias', '0.weight', '2.bias', '2.weight'])
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    stored: Mapping[str, Value]
    aliases: Mapping[str, str]
    attributes: Mapping[str, Mapping[str, int]]
    types: Mapping[str, type[nn.Module]]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    on_data: frozenset[str] = frozenset()
    headwise: frozenset[str] = frozenset()
    spans: Mapping[str, int] = field(default_factory=dict)
    spread: Mapping[str, int] = field(default_factory=dict)
    attention: str = "heads"
    explored: bool = False
    opaque: tuple[str, ...] = ()
    decided: bool = False
    notes: tuple[str, ...] = ()
    guards: tuple[Any, ...] = ()
    written: frozenset[str] = frozenset()
    weights: frozenset[tuple[str, str]] = frozenset()
    exits: Mapping[int, str] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    maskable: frozenset[str] = frozenset()
    constants: tuple[str, ...] | None = None
    varying: frozenset[tuple[int, tuple[str, int]]] = frozenset()
    resized: frozenset[int] = frozenset()
    dynamic_dims: Any = None
    unsettled: Mapping[int, bool] = field(default_factory=dict)
    interchangeable: tuple[tuple[int, ...], ...] = ()
    whole_along: Mapping[int, frozenset[int]] = field(default_factory=dict)
    decisions: tuple[Any, ...] = ()
    uncertain: Mapping[int, tuple[int | float, ...]] = field(default_factory=dict)
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def _repr_html_(self) -> str:
        rows = [
            (
                node.index,
                node.op,
                node.module,
                " ".join(str(list(v.shape)) for v in node.outputs),
                node.location,
            )
            for node in self.nodes
        ]
        title = f"Graph: {len(self.nodes)} ops, {len(self.stored)} parameters and buffers"
        return html.table(title, ("", "op", "module", "outputs", "location"), rows, self.notes)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make``, computed once per graph and key; a graph never changes.

        Args:
            key: identifies the computation and all its inputs other than the graph.
            make: computes the result.
        """
        if key not in self._derived:
            self._derived[key] = make()
        memo: T = self._derived[key]
        return memo

    def verify(self) -> None:
        """Check that every value is produced before it is read and is listed at its own index.

        Raises:
            TraceError: naming the node that reads a value that does not exist yet.
        """
        produced_indices = {v.index for v in self.values if v.producer is None}
        for position, node in enumerate(self.nodes):
            missing = [v for v in node.inputs if v.index not in produced_indices]
            if missing or node.index != position:
                raise TraceError(f"The recorded graph is broken at {node!r}: it reads {missing} before it is produced.")
            produced_indices.update(v.index for v in node.outputs)
        if any(v.index != i for i, v in enumerate(self.values)) or any(
            v.index not in produced_indices for v in self.outputs
        ):
            raise TraceError("The recorded graph is broken: a value is listed under another index or never produced.")

    def sources(self, value: Value) -> list[Value]:
        """Return the stored values of the same shape that a value is computed from, or itself if it is stored.

        For a weight that is masked or scaled at each call (``weight_orig * weight_mask``), that is the parameter behind
        it.

        Args:
            value: a value of this graph.
        """
        if value.stored:
            return [value]
        if value.producer is None:
            return []
        inputs = self.nodes[value.producer].inputs
        return [source for v in inputs if v.shape == value.shape for source in self.sources(v)]

    def users(self) -> dict[int, list[Node]]:
        """Return the nodes that read each value, by value index."""
        table: dict[int, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                table.setdefault(value.index, []).append(node)
        return table

    def unread(self, node: Node) -> bool:
        """Whether no output of a node contributes to what the model returns or remembers.

        Args:
            node: of this graph.
        """
        return not self.derived("read", self._read)[node.index]

    def _read(self) -> list[bool]:
        """Return which nodes contribute to the outputs, or write to memory."""
        values = {v.index for v in self.outputs}
        is_live = [False] * len(self.nodes)
        for node in reversed(self.nodes):
            schema = getattr(node.target, "_schema", None)
            writes = schema is None or schema.is_mutable
            is_live[node.index] = writes or any(v.index in values for v in node.outputs)
            values.update(v.index for v in node.inputs if is_live[node.index])
        return is_live

    def readers(self, value: Value) -> list[Node]:
        """Return the nodes that read a stored value, directly or through values derived from it alone.

        Args:
            value: a value of this graph.
        """
        users = self.derived("users", self.users)
        reading_nodes: list[Node] = []
        for node in users.get(value.index, []):
            through = [v for v in node.outputs if v.origin is not None and v.origin.inputs[0] is node.inputs[0]]
            reading_nodes += [reader for v in through for reader in self.readers(v)] if through else [node]
        return reading_nodes

    def check_fresh(self, model: nn.Module) -> None:
        """Check that ``model`` still has the shapes that the graph was recorded with.

        Raises:
            StaleGraphError: naming the first parameter or buffer that is missing or has another shape.
        """
        now = stored_tensors(model)
        for name, value in self.stored.items():
            if name not in now or tuple(now[name].shape) != value.shape:
                have = f"has shape {tuple(now[name].shape)} now" if name in now else "is gone"
                raise StaleGraphError(
                    f"The graph was recorded when {name!r} had shape {value.shape}; it {have}. Call engine.trace again."
                )
