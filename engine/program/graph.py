"""The recorded program of a model: plain data, with a check of its own.

A `Value` is a tensor as it flows: an input, a parameter or buffer, a captured constant, or the result of a node. A
`Node` is one call of an op. Both are frozen; analyses keep their findings in tables of their own, keyed by
``Value.index``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.errors import StaleGraphError, TraceError
from engine.program.entries import Entry
from engine.program.stored import stored_tensors

__all__ = ["Graph", "Node", "Origin", "Value", "map_values", "walk_values"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Origin:
    """The call that made a value of a stored one alone: ``self.weight.T``, or ``self.weight[index]``.

    Attributes:
        op, target, args, inputs: as those of a `Node`.
    """

    op: str
    target: Any
    args: Mapping[str, Any]
    inputs: tuple[Value, ...]

    @classmethod
    def of(cls, op: str, target: Any, args: Mapping[str, Any], inputs: tuple[Value, ...]) -> Origin | None:
        """Return a call that makes something of one stored tensor alone, and nothing else but indices; or None."""
        alone = inputs and not any(v.dtype.is_floating_point for v in inputs[1:])
        return cls(op, target, args, inputs) if alone and (inputs[0].stored or inputs[0].origin) else None


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the recorded program.

    Attributes:
        index: position in ``graph.values``.
        shape: its sizes with the example input.
        dtype: its dtype.
        name: full name where it is a parameter or a registered buffer, else None.
        data: the tensor itself where it is a constant that no module registers, else None.
        producer: index of the node that makes it, or None.
        origin: the call that makes it, where that reads one stored value, and nothing else but indices.

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
        """Whether it is a parameter or buffer, so that it can be made smaller."""
        return self.name is not None

    def __repr__(self) -> str:
        return f"%{self.index}{'' if self.name is None else ':' + self.name}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Node:
    """One call of an op.

    Attributes:
        index: position in ``graph.nodes``.
        op: name of the op without overload and without the underscore of an in-place form, e.g. ``"relu"``; ops outside
            of ``aten`` carry their namespace, e.g. ``"torchvision::nms"``.
        target: the overload that was called.
        args: every argument by name, defaults filled in; tensors are `Value`.
        sizes: for numbers among the arguments, by their place (``("size", 1)``), the expression they came from.
        inputs: the values among the arguments, in order.
        outputs: the values it makes.
        module: name of the module that called it.
        path: ``"eval"``; ``"train"`` for what only runs while training (auxiliary heads); ``"other"`` for what only
            runs at another resolution; else the name of an entry.
        site: the call in the user's code.

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

    @property
    def location(self) -> str:
        """Source file and line of the call in the user's code."""
        return "" if self.site is None else str(self.site)

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def __repr__(self) -> str:
        place = f" in {self.module!r}" if self.module else ""
        return f"{self.op}{place}{' (' + self.location + ')' if self.location else ''}"


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
    """Return nested lists, tuples and mappings with other values in the place of some, by index."""
    if isinstance(tree, Value):
        return new.get(tree.index, tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_values(x, new) for x in tree)
    if isinstance(tree, Mapping):
        return {k: map_values(x, new) for k, x in tree.items()}
    return tree


@dataclass(frozen=True, eq=False)
class Graph:
    """What a model does with an example input.

    Attributes:
        nodes: in the order of execution; those of the evaluation path first.
        values: all values.
        inputs: values of the example inputs.
        outputs: values that the model returns, of all paths, and whatever else leaves a run.
        exits: of outputs that no forward returns, by index: how they leave.
        decisions: where the code read numbers from tensors: what runs afterwards may be decided by them.
        uncertain: numbers among the arguments of nodes that may follow from what was read, by index of the node.
        stored: parameters and buffers that the program reads, by canonical name.
        aliases: every name of a parameter or buffer -> its canonical name (tied weights).
        attributes: per module the integers among its attributes.
        types: per module the name of its class.
        args, kwargs: the example inputs.
        entries: further ways in which the model was run.
        headwise: names of the attention modules that were recorded in a form without fixed sizes.
        spread: layers whose channels are others than those of their readers, with the dimension of these.
        attention: what is removed from attention wherever no rules are given, see `engine.set_attention`.
        spans: how many channels the statistics of a norm span that has fewer left, by the module's name.
        explored: whether a larger resolution was recorded too.
        opaque: names of the modules whose inside was not recorded.
        on_data: names of the entries that were recorded with data.
        decided: whether it was recorded with data: the code may decide by them which way it goes.
        notes: what could not be recorded, for the reader.
        guards: comparisons of sizes in the model's code, which have to come out as they did.
        written: names of what is stored and written to while the model runs.
        weights: module and name of each attribute in which a run leaves what is made of parameters and buffers alone.
        changing: names of buffers whose numbers are known of no call but the recorded one.
        constants: what was declared to be constant.
        varying: numbers among arguments, by index of the node and place, that were others at another size.
        resized: indices of captured constants that were others at another size.
        dynamic_dims: which dimensions of the inputs are sizes, as `engine.trace` was told; None where it was not.

    Raises:
        TraceError: by `verify`, where it is broken.
        StaleGraphError: by `check_fresh`, for a model that has other shapes by now.

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
    constants: tuple[str, ...] | None = None
    varying: frozenset[tuple[int, tuple[str, int]]] = frozenset()
    resized: frozenset[int] = frozenset()
    dynamic_dims: Any = None
    decisions: tuple[Any, ...] = ()
    uncertain: Mapping[int, tuple[int | float, ...]] = field(default_factory=dict)
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` gives, computed once per graph and key: a graph never changes.

        Args:
            key: what is computed, and from what else than the graph.
            make: computes it.
        """
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    def verify(self) -> None:
        """Check that every value is made before it is used and is listed at its own index.

        Raises:
            TraceError: naming the node that reads what does not exist yet.
        """
        made = {v.index for v in self.values if v.producer is None}
        for position, node in enumerate(self.nodes):
            missing = [v for v in node.inputs if v.index not in made]
            if missing or node.index != position:
                raise TraceError(f"The recorded graph is broken at {node!r}: it reads {missing} before it is made.")
            made.update(v.index for v in node.outputs)
        if any(v.index != i for i, v in enumerate(self.values)) or any(v.index not in made for v in self.outputs):
            raise TraceError("The recorded graph is broken: a value is listed under another index or never made.")

    def sources(self, value: Value) -> list[Value]:
        """Return the stored values of a value's own shape that it is computed from, or itself where it is stored.

        That is the parameter behind a weight that is masked or scaled at each call (``weight_orig * weight_mask``).

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
        """Whether nothing that a node makes has a part in what the model returns or remembers.

        Args:
            node: of this graph.
        """
        return not self.derived("read", self._read)[node.index]

    def _read(self) -> list[bool]:
        """Return which nodes have a part in the outputs, or in what is written to memory."""
        values = {v.index for v in self.outputs}
        found = [False] * len(self.nodes)
        for node in reversed(self.nodes):
            schema = getattr(node.target, "_schema", None)
            writes = schema is None or schema.is_mutable
            found[node.index] = writes or any(v.index in values for v in node.outputs)
            values.update(v.index for v in node.inputs if found[node.index])
        return found

    def readers(self, value: Value) -> list[Node]:
        """Return the nodes that read a stored value: itself, or by way of what is made of it alone.

        Args:
            value: a value of this graph.
        """
        users = self.derived("users", self.users)
        found: list[Node] = []
        for node in users.get(value.index, []):
            through = [v for v in node.outputs if v.origin is not None and v.origin.inputs[0] is node.inputs[0]]
            found += [reader for v in through for reader in self.readers(v)] if through else [node]
        return found

    def check_fresh(self, model: nn.Module) -> None:
        """Check that ``model`` still has the shapes that the graph was recorded with.

        Raises:
            StaleGraphError: naming the first parameter or buffer that is gone or has another shape.
        """
        now = stored_tensors(model)
        for name, value in self.stored.items():
            if name not in now or tuple(now[name].shape) != value.shape:
                have = f"has shape {tuple(now[name].shape)} now" if name in now else "is gone"
                raise StaleGraphError(
                    f"The graph was recorded when {name!r} had shape {value.shape}; it {have}. Call engine.trace again."
                )
