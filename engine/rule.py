"""What an op declares about itself, the registry of these declarations, and what happens to an op without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engine.errors import RuleError
from engine.program.expressions import Expr
from engine.program.graph import Node, Value
from engine.source.sizes import numbers_in

if TYPE_CHECKING:
    from engine.analysis.constants import Constants
    from engine.analysis.propagate import Labels
    from engine.analysis.use import Use
    from engine.program.contraction import Contraction

__all__ = ["Demand", "Registry", "Rule", "Sample", "Shapes", "Statistic", "as_recorded"]

Shapes = Callable[[Value], tuple[int, ...]]
"""Gives the shape of a value: the recorded one, or the one it will have."""


@dataclass(frozen=True)
class Demand:
    """What a number among an op's arguments has to be once tensors are smaller.

    Attributes:
        argument: the argument's name and the position of the integer in it.
        given: the number that was passed.
        wanted: what it has to become.
        expr: where the op itself takes the number from, for one that is no argument (what a mean divides by).
        dim: the dimension of the output whose size the number is, for one that is.
    """

    argument: tuple[str, int]
    given: int | float
    wanted: int | float
    expr: Expr | None = None
    dim: int | None = None


@dataclass(frozen=True)
class Sample:
    """A small network around one op, with an input, for the tests that every rule goes through.

    Attributes:
        make: builds the network.
        shape: shape of its input, batch first.
        name: what it shows.

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
    """Channels of a value: those that each have a share in all outputs, as in a norm over them, or those put out.

    Attributes:
        input: what is normalised, read or put out.
        dim: the dimension of the channels.
        groups: number of groups that have statistics of their own.
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
    """A number that is no size of a tensor (``x * heads``) stays what it is."""
    for name, position in node.sizes:
        number = list(numbers_in(node.args[name]))[position]
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
    node: Node, tensor: Callable[[Value], Tensor], stays: Callable[[Value], Tensor | None]
) -> Iterable[tuple[Value, Tensor]]:
    return ()


def _no_needs(node: Node, use: Use) -> Iterable[tuple[Value, int, Tensor]]:
    return ()


def _no_samples() -> Iterable[Sample]:
    return ()


@dataclass(frozen=True)
class Rule:
    """All that the engine knows of an op, or of several that behave alike.

    What is left out is the safe answer: the result varies, everything is used, nothing is counted. Labels have no safe
    answer but freezing, so they are required.

    Attributes:
        ops: names of the ops (``Node.op``).
        labels: passes slot labels from inputs to outputs and ties those that must go together.
        constants: what is known of the outputs without running the model: one compact float64 array per output, NaN
            where it varies; None if nothing is known.
        use: passes on which entries of the inputs have an influence, given which entries of the outputs have.
        macs: multiply-accumulates under given shapes.
        elementwise: operations per output element, for counting in ``"full"`` mode.
        demands: what its numbers have to become when slots are removed; by default they stay what they are.
        attributes: integer attributes that the owner module needs under given shapes (``out_channels`` …).
        contraction: how the op contracts channels with a weight, for those that do.
        inner: for an op that contracts several times inside (a recurrent layer), each of these. Where input or output
            are no values of their own, the weight stands for them: its columns and rows have the same slots.
        magnitude: where an op scales directions (weight norm), the stored value of the scales, that of the directions,
            and along which dimension there are several; masks close scales, and no direction, which must not be zero.
        corrections: what to add to stored values, in full shape and float64, so that the op does the same with what
            is left of others; NaN where nothing makes up for it. Given data by value, and which entries stay.
        needs: what such an op cannot do without beside what it is given: of a dimension of a value, which indices.
        produces: channels that an op other than a contraction puts out from parameters of its own (a table's columns).
        absorbs: the stored value that takes up a constant added to the input (``value - constant``), for those that
            can.
        statistic: the channels that a norm's statistics span, for norms that can do without constant ones.
        only_zeros: channels of which only those may go that are constantly zero, and that nothing has to stand in for.
        refills: channels of which those may go that are constant, as the op puts their constants in their place.
        normalises: whether it is a norm, whose output the certificate compares.
        unchecked: whether the op reads on in memory where sizes do not fit, so that cuts must not be tried on it.
        samples: small networks that exercise it.

    Raises:
        RuleError: by a `Registry`, where two rules claim an op.

    Example:
        An op that changes each entry by itself; that is all there is to say where it is not looked into further:

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
    magnitude: Callable[[Node], tuple[Value, Value, int] | None] = _no_magnitude
    corrections: Callable[
        [Node, Callable[[Value], Tensor], Callable[[Value], Tensor | None]], Iterable[tuple[Value, Tensor]]
    ] = _no_corrections
    needs: Callable[[Node, Use], Iterable[tuple[Value, int, Tensor]]] = _no_needs
    produces: Callable[[Node], Iterable[Statistic]] = _no_channels
    absorbs: Callable[[Node], Value | None] | None = None
    statistic: Callable[[Node], Statistic | None] | None = None
    only_zeros: Callable[[Node], Iterable[Statistic]] = _no_channels
    refills: Callable[[Node], Iterable[Statistic]] = _no_channels
    normalises: bool = False
    unchecked: bool = False
    samples: Callable[[], Iterable[Sample]] = _no_samples


UNKNOWN = Rule(ops=(), labels=_freeze_everything)


class Registry(Mapping[str, Rule]):
    """Rules by op name. Two rules for one op are an error; ``registry + rules`` is a new registry.

    Args:
        rules: declarations, each of one or several ops.

    Raises:
        RuleError: where two rules claim an op.

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

    __hash__ = object.__hash__  # registries are told apart by identity, so that what follows from one can be kept

    def __eq__(self, other: object) -> bool:
        return self is other

    def __len__(self) -> int:
        return len(self._rules)

    def __add__(self, rules: Iterable[Rule]) -> Registry:
        return Registry([*self.distinct(), *rules])

    def register(self, *rules: Rule) -> None:
        """Add rules to this registry itself, for all that use it from now on; a graph of before keeps what it has.

        ``RULES.register(mine)`` in the module that defines an op is how callbacks come to know it, in every process.

        Args:
            rules: declarations of ops that have none.

        Raises:
            RuleError: where an op has a rule already; nothing is added then.

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
        """Return the rules, each once."""
        return list({id(rule): rule for rule in self._rules.values()}.values())

    def rule(self, op: str) -> Rule:
        """Return the rule of an op, or the one that freezes.

        Args:
            op: its name, as `Node.op`.
        """
        return self._rules.get(op, UNKNOWN)

    def contraction(self, node: Node) -> Any:
        """Return how a node contracts channels with a weight, or None.

        Args:
            node: a node of a graph.
        """
        rule = self.rule(node.op)
        return None if rule.contraction is None else rule.contraction(node)

    def contractions(self, node: Node) -> Sequence[Contraction]:
        """Return how a node contracts channels with weights: once, several times inside, or not at all.

        Args:
            node: a node of a graph.
        """
        rule = self.rule(node.op)
        return rule.inner(node) if rule.contraction is None else (rule.contraction(node),)
