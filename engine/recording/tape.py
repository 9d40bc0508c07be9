"""The nodes and values recorded from a model so far; the latest ones can be dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from engine.alternatives.coefficients import Coefficients
from engine.alternatives.mutable_state import MutableState
from engine.alternatives.other_sizes import OtherSizes
from engine.numbers.integers import integers
from engine.program.expressions import AttributeOf, Guard, leaves
from engine.program.graph import Graph, Node, Value
from engine.program.stored import distinct_modules, stored_tensors
from engine.source.reassigned import Reassigned

__all__ = ["Mark", "Run", "Tape", "repeats"]


@dataclass(frozen=True)
class Mark:
    """A place in the program: how much of it was recorded before."""

    nodes: int = 0
    values: int = 0
    inputs: int = 0
    outputs: int = 0
    guards: int = 0


@dataclass(frozen=True)
class Run:
    """What was recorded of a run of the model.

    Attributes:
        nodes: the calls of ops.
        guards: the decisions by sizes and attributes.
        inputs, outputs: the values that enter and leave.
    """

    nodes: Sequence[Node]
    guards: Sequence[Guard]
    inputs: Sequence[Value]
    outputs: Sequence[Value]


class Tape:
    """The nodes and values of one or more runs of a model.

    Args:
        model: gives the names of parameters and buffers, which are known by identity.
        changing: the tensors whose numbers may change between calls; None if there are none.
    """

    def __init__(self, model: nn.Module, changing: MutableState | None) -> None:
        self._model, self._changing = model, changing
        self._names: dict[int, str] = {}
        self._aliases: dict[str, str] = {}
        self._tensors = stored_tensors(model)
        self._modules = {id(module): name for name, module in distinct_modules(model).items()}
        self._owners: dict[str, list[str]] = {}
        for name, tensor in self._tensors.items():
            canonical = self._aliases[name] = self._names.setdefault(id(tensor), name)
            self._owners.setdefault(canonical, []).append(name.rpartition(".")[0])
        self._values: list[Value] = []
        self._nodes: list[Node] = []
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._exits: dict[int, str] = {}
        self._decisions: dict[Any, None] = {}
        self._uncertain: dict[int, tuple[int | float, ...]] = {}
        self._guards: list[Guard] = []
        self._unsettled: dict[int, bool] = {}
        self._interchangeable: tuple[tuple[int, ...], ...] = ()
        self._whole_along: dict[int, frozenset[int]] = {}
        self._written: set[str] = set()
        self._weights: set[tuple[str, str]] = set()
        self._stored: dict[str, Value] = {}
        self.notes: list[str] = []
        self._reassigned = Reassigned(model)
        self.others = OtherSizes(self._integers, self.reached_new_code)

    def reached_new_code(self) -> bool:
        """Whether the last run was the first to pass an untaken branch that reads something, or caught a new error."""
        return False

    def _integers(self) -> dict[tuple[str, str], int]:
        modules = distinct_modules(self._model)
        return {(name, key): number for name, module in modules.items() for key, number in integers(module).items()}

    @property
    def coefficients(self) -> Coefficients:
        """The floats in attributes that code outside the model may set."""
        return Coefficients({} if self._changing is None else self._changing.coefficients)

    def mark(self) -> Mark:
        """Return the current end of the program, for `since` and `drop`."""
        return Mark(len(self._nodes), len(self._values), len(self._inputs), len(self._outputs), len(self._guards))

    def drop_if_repeated(self, mark: Mark, shapes: bool) -> None:
        """Drop what was recorded since ``mark`` if it only repeats the first run (also in ``shapes``, if these count).

        A run that computes nothing new may still be the first to pass by code that did not run and reads its values.
        """
        first = [n for n in self._nodes if n.path == "eval"]
        again = self._nodes[mark.nodes :]
        leaving = [_places_of(run, self._outputs) for run in (first, again)]
        if not self.reached_new_code() and repeats(again, first, shapes) and leaving[0] == leaving[1]:
            self.drop(mark)

    def origins(self, kept: tuple[str, Any]) -> list[tuple[str | None, ...]]:
        """Return the calls that compute the recorded content of a variable, by module, op and place in the code."""
        kind, content = kept
        return [self._origin(value) for value in content] if kind in ("values", "inside") else [kept]

    def _origin(self, value: Value) -> tuple[str | None, ...]:
        if value.producer is None:
            return (value.name,)
        node = self._nodes[value.producer]
        return node.module, node.op, None if node.site is None else node.site.spot

    def since(self, mark: Mark) -> Run:
        """Return what was recorded since ``mark``."""
        inputs, outputs = self._inputs[mark.inputs :], self._outputs[mark.outputs :]
        return Run(self._nodes[mark.nodes :], self._guards[mark.guards :], inputs, outputs)

    def holds_nodes(self, nodes: Sequence[Node]) -> bool:
        """Whether calls that were recorded are still part of the program."""
        return all(node.index < len(self._nodes) and self._nodes[node.index] is node for node in nodes)

    def drop(self, mark: Mark) -> None:
        """Drop what was recorded since ``mark``."""
        self._stored = {name: v for name, v in self._stored.items() if v.index < mark.values}
        self._exits = {index: how for index, how in self._exits.items() if index < mark.values}
        self._uncertain = {index: numbers for index, numbers in self._uncertain.items() if index < mark.nodes}
        del self._nodes[mark.nodes :], self._values[mark.values :], self._guards[mark.guards :]
        del self._inputs[mark.inputs :], self._outputs[mark.outputs :]

    def _is_stored(self, value: Value) -> bool:
        """Whether a value is computed from parameters and buffers alone, as a weight that is masked at each call."""
        waiting, seen = [value], {value.index}
        while waiting:
            value = waiting.pop()
            inputs = () if value.producer is None else self._nodes[value.producer].inputs
            if not inputs and not value.stored:
                return False
            waiting += [v for v in inputs if v.index not in seen]
            seen.update(v.index for v in inputs)
        return True

    def graph(self, model: nn.Module, args: Any, kwargs: Any) -> Graph:
        """Return the recorded program as a graph."""
        modules = distinct_modules(model)
        return Graph(
            nodes=tuple(self._nodes),
            values=tuple(self._values),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            exits=dict(self._exits),
            decisions=tuple(self._decisions),
            uncertain=dict(self._uncertain),
            stored=self._stored,
            aliases=self._aliases,
            attributes={name: integers(m) for name, m in modules.items()},
            types={name: type(m) for name, m in modules.items()},
            args=args,
            kwargs=kwargs,
            notes=tuple(self.notes),
            guards=tuple(g for g in self._guards if g.decides and any(True for _ in leaves(g.expr))),
            written=frozenset(self._written),
            weights=frozenset(self._weights),
            changing=frozenset() if self._changing is None else frozenset(self._changing.names & self._aliases.keys()),
            maskable=frozenset(filter(self._is_maskable, self._names.values())),
            varying=frozenset(self.others.varying),
            resized=frozenset(self.others.resized),
            unsettled=dict(self._unsettled),
            interchangeable=self._interchangeable,
            whole_along=self._whole_along,
        )

    def _is_maskable(self, name: str) -> bool:
        """Whether masks apply to a buffer as they do to a parameter."""
        return self._changing is not None and name in self._changing.maskable

    def written_constants(self) -> set[str]:
        """Return the tensors taken for constant that a run wrote to; in the next recording they may vary.

        Neither are tables masked then whose size code takes from an attribute: a filter repeated for each channel.
        """
        if self._changing is None:
            return set()
        sized = set(self._sized_by_attributes())
        tables = {name for name in self._changing.maskable if self._aliases.get(name) in sized}
        self._changing.maskable -= tables
        return tables | self._changing.add_written(self._written, self._aliases)

    def _sized_by_attributes(self) -> Iterator[str]:
        """Yield the names of tables that an op with a number from an attribute reads alone."""
        behind = {value.index: {name} for name, value in self._stored.items() if self._is_maskable(name)}
        for node in self._nodes if behind else ():
            if node.inputs and all(value.index in behind for value in node.inputs):
                names = set[str]().union(*(behind[value.index] for value in node.inputs))
                behind.update((value.index, names) for value in node.outputs)
                if any(isinstance(leaf, AttributeOf) for expr in node.sizes.values() for leaf in leaves(expr)):
                    yield from names


def repeats(one: Sequence[Node], other: Sequence[Node], shapes: bool) -> bool:
    """Whether two runs call the same ops on the same results, whatever flags these receive.

    Args:
        one, other: the calls of the runs.
        shapes: whether shapes have to agree, too.
    """
    return _summaries(one, shapes) == _summaries(other, shapes)


def _summaries(nodes: Sequence[Node], shapes: bool) -> list[tuple[Any, ...]]:
    """Return the op, module and shapes of each call of a run, and the calls whose results it reads."""
    places = {value.index: place for place, node in enumerate(nodes) for value in node.outputs}
    return [
        (
            node.op,
            node.module,
            [v.shape for v in (*node.inputs, *node.outputs)] if shapes else [],
            [places.get(v.index, v.name) for v in node.inputs],
        )
        for node in nodes
    ]


def _places_of(nodes: Sequence[Node], outputs: Sequence[Value]) -> set[int]:
    """Return the positions in a run of the calls that compute outputs."""
    leaving = {value.index for value in outputs}
    return {place for place, node in enumerate(nodes) if any(value.index in leaving for value in node.outputs)}
