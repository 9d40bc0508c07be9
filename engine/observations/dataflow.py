"""Flow of recorded values: the ops that read them, the values that enter and leave a module, and constants."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from engine.flow.effects import Functions
from engine.program.expressions import AttributeOf, leaves
from engine.program.graph import Node, Value

__all__ = ["Dataflow", "is_inside"]


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is another one or a part of it.

    Args:
        module: name of a module.
        outer: name of the other one; of the model itself, it is empty.

    Example:
        >>> is_inside("head.0", "head"), is_inside("header", "head")
        (True, False)
    """
    return not outer or module == outer or module.startswith(f"{outer}.")


class Dataflow:
    """The flow of values through recorded ops.

    Args:
        nodes, values: of all runs.
        functions: effects of torch's functions on the entries of tensors.
        parameters: names of parameters; all stored values by default.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        functions: Functions,
        parameters: Collection[str] | None = None,
    ) -> None:
        self.nodes, self.functions = nodes, functions
        self._values, self._parameters = values, parameters
        self._channel_dims: dict[int, int | None] = {}
        self._boundaries: dict[str, tuple[list[Value], list[Value]]] = {}

    def contains(self, value: Value) -> bool:
        """Whether a value is part of the program; a value of a discarded run is not."""
        return value.index < len(self._values) and self._values[value.index] is value

    @functools.cached_property
    def attributes(self) -> frozenset[tuple[str, str]]:
        """The integer attributes that ops get, alone or in sizes computed from them, by module and name."""
        sizes = (leaf for node in self.nodes for expr in node.sizes.values() for leaf in leaves(expr))
        return frozenset((leaf.module, leaf.name) for leaf in sizes if isinstance(leaf, AttributeOf))

    def nodes_in(self, module: str) -> list[Node]:
        """Return the ops that run in a module and its parts, including shared modules that they call."""
        return [n for n in self.nodes if any(is_inside(name, module) for name in (n.module, *n.callers))]

    def boundary(self, module: str) -> tuple[list[Value], list[Value]]:
        """Return the values that a module reads from outside, and those of its results that are read outside.

        Of results that nothing reads, all are returned that the module does not read either.
        """
        if module not in self._boundaries:
            inside = self.nodes_in(module)
            results = {v.index: v for n in inside for v in n.outputs}
            indices = {n.index for n in inside}
            outputs = {v.index for n in self.nodes if n.index not in indices for v in n.inputs} & results.keys()
            outputs = outputs or results.keys() - {v.index for n in inside for v in n.inputs}
            inputs = {v.index: v for n in inside for v in n.inputs if v.index not in results and not v.stored}
            self._boundaries[module] = list(inputs.values()), [results[index] for index in outputs]
        return self._boundaries[module]

    def follows(self, value: Value, others: Collection[Value], aligned: bool) -> bool:
        """Whether a value is computed from one of others.

        Args:
            value: the value.
            others: the values.
            aligned: whether all ops in between have to preserve the shape, and the channel of each entry.
        """
        wanted, waiting, seen = {other.index for other in others}, [value], {value.index}
        while waiting:
            inner = waiting.pop()
            if inner.index in wanted and inner is not value:
                return True
            node = None if inner.producer is None else self.nodes[inner.producer]
            if node is not None and (not aligned or node.op.rstrip("_") in self.functions.aligned):
                inputs = [v for v in node.inputs if not v.stored and v.index not in seen]
                waiting += [v for v in inputs if not aligned or v.shape == value.shape]
                seen.update(v.index for v in inputs)
        return False

    def is_constant(self, value: Value) -> bool:
        """Whether the numbers in a value depend on neither inputs nor parameters."""
        if not self.contains(value):
            return False
        if value.name is not None:
            return self._parameters is not None and value.name not in self._parameters
        if value.producer is None:
            return value.data is not None
        node = self.nodes[value.producer]
        reads_shape_only = node.op in self.functions.filling
        return all(map(self.is_constant, node.inputs[reads_shape_only:]))

    def channel_dim(self, value: Value) -> int | None:
        """Return the dimension of a value over which all its consumers contract; None if there is none."""
        if value.index not in self._channel_dims:
            dims: set[int | None] = set()
            for node in self._consumers.get(value.index, ()):
                dims |= self._dims_contracted(value, node)
            dim = dims.pop() if len(dims) == 1 else None
            is_unique = dim is not None and value.shape.count(value.shape[dim]) == 1
            self._channel_dims[value.index] = dim if is_unique else None
        return self._channel_dims[value.index]

    def _dims_contracted(self, value: Value, node: Node) -> set[int | None]:
        """Return the dimensions over which an op, or the consumers of its results, contract a value."""
        contraction = self.functions.contracted(node)
        same_rank = contraction is None and all(output.ndim == value.ndim for output in node.outputs)
        further = [self.channel_dim(output) if same_rank else None for output in node.outputs]
        sizes = {o.shape[d] for o, d in zip(node.outputs, further, strict=True) if d is not None}
        dims: set[int | None] = (
            {contraction[1]} if contraction is not None and contraction[0] is value else set(further)
        )
        return dims if all(d is not None and sizes <= {value.shape[d]} for d in dims) else {None}

    @functools.cached_property
    def _consumers(self) -> Mapping[int, list[Node]]:
        consumers: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for index in {value.index for value in node.inputs}:
                consumers[index].append(node)
        return consumers
