"""Where constants of removed channels can be folded: the bias of their consumer, or the running mean behind it."""

from __future__ import annotations

import functools

from torch import Tensor

from engine.analysis.constants import Constants
from engine.program.contraction import Contraction
from engine.program.graph import Node, Value
from engine.removal.propagate import Structure

__all__ = ["Homes"]


class Homes:
    """Fold targets of a graph's contractions, cached per weight rather than per call: a cell is called at each step.

    Args:
        structure: structure of the graph.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure, self._graph = structure, structure.graph
        self._outputs = {value.index for value in structure.graph.outputs}
        self._foldable: dict[int, bool] = {}
        self._settled: dict[tuple[int, int, bool], Tensor] = {}
        self._sinks: dict[tuple[int, bool], Value | None] = {}

    @functools.cached_property
    def _users(self) -> dict[int, list[Node]]:
        return self._graph.users()

    @functools.cached_property
    def _contractions(self) -> dict[int, list[Contraction]]:
        """The contractions of each node, by its index."""
        table: dict[int, list[Contraction]] = {}
        for node, c in self._structure.contractions():
            table.setdefault(node.index, []).append(c)
        return table

    def foldable(self, c: Contraction) -> bool:
        """Whether constants can be folded into the columns of a weight: it is stored and nothing else reads it.

        A tied embedding or a transposed use of the same weight would see the change.

        Args:
            c: a contraction with the weight.
        """
        key = c.weight.index
        if key not in self._foldable:
            self._foldable[key] = c.weight.stored and not self.changes(c.weight) and self._alike(c.weight)
        return self._foldable[key]

    def changes(self, value: Value) -> bool:
        """Whether code that did not run may change the entries of a stored value before they are used."""
        return value.index in self._graph.unsettled

    def _alike(self, weight: Value) -> bool:
        ways: set[bool] = set()
        for reader in self._graph.readers(weight):
            same = {o.transposed for o in self._contractions.get(reader.index, ()) if o.weight is weight}
            if not same:
                return False
            ways |= same
        return len(ways) == 1

    def settled(self, c: Contraction, constants: Constants) -> Tensor:
        """Return at which inputs of a contraction all weights have numbers.

        Args:
            c: a contraction.
            constants: what is constant.
        """
        key = c.weight.index, c.groups, c.transposed
        if key not in self._settled:
            self._settled[key] = constants.settled_inputs(c)
        return self._settled[key]

    def sink(self, c: Contraction) -> Value | None:
        """Return the bias, or else the running mean of the norm that is the only consumer of the output, at each call.

        Args:
            c: a contraction.
        """
        if c.bias is None and c.output is c.weight:  # its output is used inside the op
            return None
        key = (c.weight.index, False) if c.bias is None else (c.bias.index, True)
        if key not in self._sinks:
            sink = self._mean(c.weight) if c.bias is None else self._bias(c.bias)
            self._sinks[key] = None if sink is None or self.changes(sink) else sink
        return self._sinks[key]

    def _bias(self, bias: Value) -> Value | None:
        """Return a stored bias that belongs to one weight only, at each call."""
        weights: set[Value] = set()
        for reader in self._users[bias.index]:
            own = {o.weight for o in self._contractions.get(reader.index, ()) if o.bias is bias}
            weights |= own
            if not own or len(weights) > 1:
                return None
        return bias if bias.stored else None

    def _mean(self, weight: Value) -> Value | None:
        means: set[Value] = set()
        norms: list[Node] = []
        for call in self._graph.readers(weight):
            readers = self._users.get(call.output.index, []) if call.outputs else []
            absorbs = self._structure.rules.of(readers[0]).rare.absorbs if len(readers) == 1 else None
            mean = None if absorbs is None or call.output.index in self._outputs else absorbs(readers[0])
            if mean is None:
                return None
            means.add(mean)
            norms += readers
        mean = means.pop() if len(means) == 1 else None
        return mean if mean is not None and self._users[mean.index] == norms else None
