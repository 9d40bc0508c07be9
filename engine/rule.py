"""Op rules: what the analyses need to know about an op, and the registry that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.errors import RuleError
from engine.numbers.sizes import numbers_in
from engine.program.contraction import Contraction
from engine.program.expressions import Expr
from engine.program.graph import Graph, Node, Value

__all__ = ["Demand", "Rare", "Registry", "Rule", "Sample", "Shapes", "Statistic", "as_recorded"]

Shapes = Callable[[Value], tuple[int, ...]]
"""Returns the shape of a value: as recorded, or after compaction."""


@dataclass(frozen=True)
class Demand:
    """The new value of a number among an op's arguments after tensors have been narrowed.

    Attributes:
        argument: name of the argument and position of the integer in it.
        original: the number as recorded.
        wanted: the number required after narrowing.
        expr: expression for a number that the op computes itself rather than takes as an argument (a mean's divisor).
        dim: dimension of the output whose size the number is, if it is one.
    """

    argument: tuple[str, int]
    original: int | float
    wanted: int | float
    expr: Expr | None = None
    dim: int | None = None


@dataclass(frozen=True)
class Sample:
    """A small network around one op, with an input shape; every rule is tested on its samples.

    Attributes:
        make: builds the network.
        shape: shape of its input, batch first.
        name: what the sample covers.

    Example:
        >>> def net():
        ...     return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 1, 1))
        >>> sample = Sample(net, (2, 1, 4, 4), "tanh")
        >>> sample.make()(torch.zeros(sample.shape)).shape
        torch.Size([2, 1, 4, 4])
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class Statistic:
    """Channels of a value, such as those that a norm's statistics span or an embedding produces.

    Attributes:
        input: the value that is normalised, read or produced.
        dim: dimension of the channels.
        groups: number of channel groups with separate statistics.
    """

    input: Value
    dim: int
    groups: int = 1


def _freeze_everything(node: Node, labels: Labels) -> None:
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"{node.op} has no rule ({node!r})")


def _varies(node: Node, constants: Constants) -> None:
    return None


def _use_everything(node: Node, use: Use) -> None:
    for value in node.inputs:
        use.add_all(value)


def _nothing(node: Node, shapes: Shapes) -> int:
    return 0


def as_recorded(node: Node, kept: Callable[[Value, int], Tensor | None], shapes: Shapes) -> Iterable[Demand]:
    """Keep numbers that are not the size of a tensor (``x * heads``) as recorded."""
    for name, position in node.sizes:
        number = numbers_in(node.args[name])[position]
        yield Demand((name, position), number, number)


def _no_attributes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    return {}


def _no_channels(node: Node) -> Iterable[Statistic]:
    return ()


def _no_contractions(node: Node) -> Sequence[Contraction]:
    return ()


def _no_magnitude(node: Node) -> tuple[Value, Value, int] | None:
    return None


def _no_corrections(
    node: Node, tensor: Callable[[Value], Tensor], kept_of: Callable[[Value], Tensor | None]
) -> Iterable[tuple[Value, Tensor]]:
    return ()


def _no_needs(node: Node, use: Use) -> Iterable[tuple[Value, int, Tensor]]:
    return ()


def _no_centre(node: Node, graph: Graph) -> Iterable[Statistic]:
    return ()


def _no_pairs(node: Node, graph: Graph) -> Mapping[int, int]:
    return {}


def _no_samples() -> Iterable[Sample]:
    return ()


@dataclass(frozen=True)
class Rare:
    """The part of a `Rule` that only few ops need.

    Attributes:
        magnitude: for an op that scales directions (weight norm), the stored scales, the stored directions, and the
            dimension along which there are several. Masks zero the scales only, because a direction must not be zero.
        corrections: amounts to add to stored values, in full shape and float64, so that the op computes the same from
            the entries that remain; NaN where no correction exists. Takes the data by value, and the entries that are
            kept.
        needs: indices along a dimension of a value that the op requires in addition to what is used.
        produces: channels that an op other than a contraction produces from its own parameters (columns of a table).
        absorbs: the stored value that a constant added to the input can be folded into (``value - constant``), if there
            is one.
        refills: channels that can be removed if they are constant, because the op fills the constants in again.
        centre: for an op that averages squares of ``x - u``, where u is the same for all channels, the channels of x,
            which can be removed if they are zero there.
        preserved: dimensions of the input, each with the dimension of the output that is the same, whatever amounts the
            call takes along the other dimensions; empty if the arguments' names show which dimensions they concern.
        for_gradients: names of arguments that gradients depend on, but outputs do not.
        lends: whether the op takes nothing but a dtype, a device or a number from its inputs.
        unchecked: whether the op reads out of bounds when sizes do not match, so that cuts must not be tried on it.

    Example:
        >>> def labels(node, labels):
        ...     labels.pass_on(node.inputs[0], node.output)
        >>> Rule(("mine::gather",), labels, rare=Rare(unchecked=True)).rare.unchecked
        True
    """

    magnitude: Callable[[Node], tuple[Value, Value, int] | None] = _no_magnitude
    corrections: Callable[
        [Node, Callable[[Value], Tensor], Callable[[Value], Tensor | None]], Iterable[tuple[Value, Tensor]]
    ] = _no_corrections
    needs: Callable[[Node, Use], Iterable[tuple[Value, int, Tensor]]] = _no_needs
    produces: Callable[[Node], Iterable[Statistic]] = _no_channels
    absorbs: Callable[[Node], Value | None] | None = None
    refills: Callable[[Node], Iterable[Statistic]] = _no_channels
    centre: Callable[[Node, Graph], Iterable[Statistic]] = _no_centre
    preserved: Callable[[Node, Graph], Mapping[int, int]] = _no_pairs
    for_gradients: frozenset[str] = frozenset()
    lends: bool = False
    unchecked: bool = False


@dataclass(frozen=True)
class Rule:
    """Everything the engine knows about an op, or about several ops that behave alike.

    Every omitted field has a safe default: the result varies, everything is used, nothing is counted. The only safe
    default for labels would be to freeze everything, so ``labels`` is required.

    Attributes:
        ops: names of the ops (``Node.op``).
        labels: propagates slot labels from inputs to outputs and ties slots that have to be removed together.
        constants: the outputs' constants, without running the model: one compact float64 array per output, NaN where it
            varies; None if nothing is known.
        use: marks the entries of the inputs that influence the used entries of the outputs.
        macs: number of multiply-accumulates for the given shapes.
        elementwise: operations per output element, counted in ``"full"`` mode.
        demands: new values of the op's numeric arguments when slots are removed; unchanged by default.
        attributes: integer attributes of the owner module for the given shapes (``out_channels`` …).
        contraction: how the op contracts channels with a weight, if it does.
        inner: the contractions inside an op that has several (a recurrent layer). Where an input or output is not a
            value of the graph, the weight stands in for it: its columns and rows have the same slots.
        statistic: the channels that a norm's statistics span, for norms that can be corrected for constant channels.
        only_zeros: channels that can be removed only if they are constantly zero and need no replacement.
        normalises: whether the op is a norm, whose output the certificate compares.
        rare: what only few ops have.
        samples: small networks that exercise the op.

    Raises:
        RuleError: by a `Registry`, if two rules claim the same op.

    Example:
        An element-wise op needs nothing else:

        >>> def labels(node, labels):
        ...     labels.pass_on(node.inputs[0], node.output)
        >>> rule = Rule(("mine::softclip",), labels)
        >>> import engine
        >>> (engine.RULES + [rule])["mine::softclip"] is rule
        True
    """

    ops: tuple[str, ...]
    labels: Callable[[Node, Labels], None]
    constants: Callable[[Node, Constants], Sequence[Tensor] | None] = _varies
    use: Callable[[Node, Use], None] = _use_everything
    macs: Callable[[Node, Shapes], int] = _nothing
    elementwise: int = 0
    demands: Callable[[Node, Callable[[Value, int], Tensor | None], Shapes], Iterable[Demand]] = as_recorded
    attributes: Callable[[Node, Shapes], Mapping[str, int]] = _no_attributes
    contraction: Callable[[Node], Contraction] | None = None
    inner: Callable[[Node], Sequence[Contraction]] = _no_contractions
    statistic: Callable[[Node], Statistic | None] | None = None
    only_zeros: Callable[[Node], Iterable[Statistic]] = _no_channels
    normalises: bool = False
    rare: Rare = Rare()
    samples: Callable[[], Iterable[Sample]] = _no_samples


UNKNOWN = Rule(ops=(), labels=_freeze_everything)


def _is_along_a_number(node: Node) -> bool:
    """Whether a node computes a number from a number, along a dimension."""
    if not node.inputs or any(value.ndim for value in (node.inputs[0], *node.outputs)):
        return False
    return any("dim" in name and value is not None for name, value in node.args.items())


class Registry(Mapping[str, Rule]):
    """Rules by op name. Two rules for one op are an error; ``registry + rules`` is a new registry.

    Args:
        rules: rules, each for one or several ops.

    Raises:
        RuleError: if two rules claim the same op.

    Example:
        >>> from engine.ops import RULES
        >>> RULES["relu"] is RULES["sigmoid"], RULES.rule("no::such_op") is UNKNOWN
        (True, True)
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules: dict[str, Rule] = {}
        for rule in rules:
            for op in rule.ops:
                if op in self._rules:
                    raise RuleError(f"Two rules claim the op {op!r}; remove one of them, or rename the op.")
                self._rules[op] = rule

    def __getitem__(self, op: str) -> Rule:
        return self._rules[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    __hash__ = object.__hash__  # registries compare by identity, so that results derived from them can be cached

    def __eq__(self, other: object) -> bool:
        return self is other

    def __len__(self) -> int:
        return len(self._rules)

    def __add__(self, rules: Iterable[Rule]) -> Registry:
        return Registry([*self.distinct(), *rules])

    def register(self, *rules: Rule) -> None:
        """Add rules to this registry in place; existing graphs are unaffected.

        Call ``RULES.register(mine)`` in the module that defines an op to make the rule known to the callbacks of every
        process.

        Args:
            rules: rules for ops that have none yet.

        Raises:
            RuleError: if an op already has a rule; nothing is added in that case.

        Example:
            >>> registry = Registry()
            >>> def labels(node, labels):
            ...     labels.pass_on(node.inputs[0], node.output)
            >>> registry.register(Rule(("mine::identity",), labels))
            >>> list(registry)
            ['mine::identity']
        """
        self._rules = (self + rules)._rules

    def distinct(self) -> list[Rule]:
        """Return each rule once."""
        return list({id(rule): rule for rule in self._rules.values()}.values())

    def rule(self, op: str) -> Rule:
        """Return the rule of an op, or the one that freezes everything for an unknown op.

        Args:
            op: name of the op, as in `Node.op`.
        """
        return self._rules.get(op, UNKNOWN)

    def of(self, node: Node) -> Rule:
        """Return the rule of a node.

        torch accepts ``loss.mean(0)`` for a tensor without dimensions. It has no channels, so rules need not handle it.

        Args:
            node: a node of a graph.
        """
        return UNKNOWN if _is_along_a_number(node) else self.rule(node.op)

    def contraction(self, node: Node) -> Any:
        """Return how a node contracts channels with a weight, or None if it does not.

        Args:
            node: a node of a graph.
        """
        rule = self.of(node)
        return None if rule.contraction is None else rule.contraction(node)

    def contractions(self, node: Node) -> Sequence[Contraction]:
        """Return all contractions of a node with weights: one, several for a recurrent layer, or none.

        Args:
            node: a node of a graph.
        """
        rule = self.of(node)
        return rule.inner(node) if rule.contraction is None else (rule.contraction(node),)
