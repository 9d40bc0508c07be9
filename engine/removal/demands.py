"""Check whether sizes written in Python code follow when slots are removed; freeze slots for which they do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.analysis.slots import FROZEN
from engine.program.expressions import COMPARISONS, Apply, AttributeOf, Expr, Guard, ShapeOf, describe, evaluate, leaves
from engine.program.graph import Node, Value, rule_errors
from engine.removal.followed import followed
from engine.removal.propagate import Structure
from engine.removal.shrink import Shrunk
from engine.rule import Demand, Shapes
from engine.surgery.edits import CENTRED, Pin
from engine.surgery.kinds.pins import is_pinned, pin_of

__all__ = ["Settled", "Unmet", "asked_numbers", "one_number", "settle"]


@dataclass(frozen=True, eq=False)
class _Checked:
    """A demand, and the number that the code would pass."""

    node: Node
    demand: Demand
    expr: Expr
    number: int | float

    @property
    def met(self) -> bool:
        return self.number == self.demand.wanted

    @property
    def place(self) -> tuple[Any, ...]:
        """The argument in the source: once pinned, every call that runs through it passes the same number."""
        return self.node.module, self.node.site, self.demand.argument


class Unmet(NamedTuple):
    """A node that would receive a wrong number, or a comparison that would change, with reason and slots."""

    node: Node | Guard
    reason: str
    slots: Tensor


class Settled(NamedTuple):
    """Consequences of a removal for the sizes in the code.

    Attributes:
        shrunk: the removal, with the attributes that have to be set for it.
        pins: arguments that have to be pinned.
        unmet: nodes whose arguments would still be wrong.
    """

    shrunk: Shrunk
    pins: tuple[Pin, ...]
    unmet: tuple[Unmet, ...]


def settle(shrunk: Shrunk) -> Settled:
    """Return the arguments that have to be pinned, and the nodes whose arguments would be wrong.

    An argument that the code derives from a shape or an attribute is evaluated for the new shapes; any other keeps its
    value. If the result is wrong, the argument is pinned, provided that the code can be edited; numbers that the author
    wrote down, or that depend on the batch or the resolution, are not pinned. An argument that an earlier compaction
    has pinned is pinned again. If an argument cannot be pinned and is an unmodified attribute, the attribute is set
    instead, unless that makes another argument wrong, or its number does not follow from the tensors around it.
    """
    settlement, wishes = _settled(shrunk)
    while wishes := followed(shrunk, wishes):
        overrides = {name: {**shrunk.overrides.get(name, {}), **wish} for name, wish in wishes.items()}
        again, _ = _settled(Shrunk(shrunk.structure, shrunk.keep, {**shrunk.overrides, **overrides}))
        wrong = {name for unmet in again.unmet for name in _modules(unmet)} & wishes.keys()
        if not wrong:
            return again
        wishes = {name: wish for name, wish in wishes.items() if name not in wrong}
    return settlement


def _modules(unmet: Unmet) -> Iterator[str]:
    """Yield the modules whose attributes an unmet demand reads."""
    exprs = [unmet.node.expr] if isinstance(unmet.node, Guard) else list(unmet.node.sizes.values())
    yield from (leaf.module for expr in exprs for leaf in leaves(expr) if isinstance(leaf, AttributeOf))


def _settled(shrunk: Shrunk) -> tuple[Settled, dict[str, dict[str, int]]]:
    """Settle with the current attributes; also return the attributes that would have to change, per module."""
    attribute = _attributes(shrunk)
    checked, broken = list(_checked(shrunk, attribute)), tuple(_broken(shrunk, attribute))
    if all(c.met for c in checked) and not broken:
        return Settled(shrunk, (), ()), {}
    wanted: dict[tuple[Any, ...], set[Any]] = {}
    for c in checked:  # a statistic is rewritten for the channels that its call loses, which all calls have to lose
        lost = c.number if c.demand.expr is not None else None
        wanted.setdefault(c.place, set()).add((c.demand.wanted, lost))
    pins: dict[tuple[Any, ...], Pin] = {}
    unmet: dict[int, Unmet] = {}
    wishes = _wished_by(shrunk, [unmet.node for unmet in broken if isinstance(unmet.node, Guard)])
    for c in checked:
        if not c.met and c.place not in pins:
            pin = _pin(shrunk, c) if len(wanted[c.place]) == 1 else None
            if pin is None:
                failure = Unmet(c.node, _reason(c.node, c.demand, c.expr), _involved(shrunk.structure, c))
                unmet.setdefault(c.node.index, failure)
                for attribute_of, factor in _multiplied(shrunk, c.expr):
                    if isinstance(c.demand.wanted, int) and c.demand.wanted % factor == 0:
                        wishes.setdefault(attribute_of.module, {})[attribute_of.name] = c.demand.wanted // factor
            else:
                pins[c.place] = pin
    for c in checked if wishes else ():
        # Otherwise it is right for some removals only, if at all.
        if isinstance(c.expr, Apply) and not _scales(shrunk, c, wishes) and _pin(shrunk, c) is None:
            for leaf in leaves(c.expr):
                if isinstance(leaf, AttributeOf):
                    wishes.get(leaf.module, {}).pop(leaf.name, None)
    return Settled(shrunk, tuple(pins.values()), (*unmet.values(), *broken)), {
        name: wish for name, wish in wishes.items() if wish
    }


def _wished_by(shrunk: Shrunk, guards: Iterable[Guard]) -> dict[str, dict[str, int]]:
    """Return the attributes that comparisons with a size find equal to it, with the numbers that keep them so.

    ``assert x.shape[1] == self.channels`` holds again once ``channels`` is set.
    """
    wishes: dict[str, dict[str, int]] = {}
    for guard in guards:
        if guard.expr.symbol != ("==" if guard.outcome else "!="):
            continue
        for own, other in ((guard.expr.left, guard.expr.right), (guard.expr.right, guard.expr.left)):
            if not any(isinstance(leaf, AttributeOf) for leaf in leaves(other)):
                size = evaluate(other, shrunk.shape, _no_attribute)
                for attribute, factor in _multiplied(shrunk, own):
                    if type(size) is int and size % factor == 0:
                        wishes.setdefault(attribute.module, {})[attribute.name] = size // factor
    return wishes


def _scales(shrunk: Shrunk, checked: _Checked, wishes: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether an expression follows the wished attributes by construction, as a product or quotient of the op's sizes.

    The width of a head is ``x.shape[2] // self.heads`` whichever heads of ``x`` are removed, once ``heads`` is set. An
    expression with the size of another tensor would be right for some removals only.
    """

    def attribute(expr: AttributeOf) -> int:
        recorded = shrunk.structure.graph.attributes[expr.module][expr.name]
        return wishes.get(expr.module, {}).get(expr.name, recorded)

    if any(_multiplied(shrunk, checked.expr)):
        return True
    own = [checked.node.inputs[0], *checked.node.outputs] if checked.node.inputs else []
    if not _scaled(checked.expr) or not all(_belongs(shrunk.structure, leaf, own) for leaf in leaves(checked.expr)):
        return False
    return bool(evaluate(checked.expr, shrunk.shape, attribute) == checked.demand.wanted)


def _scaled(expr: Expr) -> bool:
    """Whether an expression only multiplies and divides."""
    return not isinstance(expr, Apply) or expr.symbol in ("*", "//") and _scaled(expr.left) and _scaled(expr.right)


def _belongs(structure: Structure, leaf: ShapeOf | AttributeOf, own: list[Value]) -> bool:
    """Whether a size that changes is one of these values'."""
    slots = structure.along(leaf.value, leaf.dim) if isinstance(leaf, ShapeOf) else None
    layers = [layer.reshape(-1) for value in own for layer in structure.of(value)]
    return slots is None or bool(layers and torch.isin(slots, torch.cat(layers)).all())


def _multiplied(shrunk: Shrunk, expr: Expr) -> Iterator[tuple[AttributeOf, int]]:
    """Yield the attribute that an expression is a multiple of, and the factor, unless the factor depends on channels.

    ``self.heads`` has factor 1, ``x.shape[0] * self.heads`` the batch size.
    """
    if isinstance(expr, AttributeOf):
        yield expr, 1
    elif isinstance(expr, Apply) and expr.symbol == "*":
        for part, other in ((expr.left, expr.right), (expr.right, expr.left)):
            sizes = [leaf for leaf in leaves(other) if isinstance(leaf, ShapeOf)]
            fixed = len(sizes) == len(list(leaves(other)))
            if fixed and all(shrunk.structure.along(size.value, size.dim) is None for size in sizes):
                number = evaluate(other, shrunk.shape, _no_attribute)
                for attribute, factor in _multiplied(shrunk, part) if number else ():
                    yield attribute, factor * number


def _no_attribute(expr: AttributeOf) -> int:
    raise AssertionError(expr)


def _attributes(shrunk: Shrunk) -> Callable[[AttributeOf], int]:
    """Return a function that returns an attribute's value after the removal."""
    structure = shrunk.structure
    attributes: Mapping[str, Mapping[str, int]] | None = None

    def attribute(expr: AttributeOf) -> int:
        nonlocal attributes
        attributes = shrunk.attributes() if attributes is None else attributes
        recorded = structure.graph.attributes[expr.module][expr.name]
        return attributes.get(expr.module, {}).get(expr.name, recorded)

    return attribute


def _checked(shrunk: Shrunk, attribute: Callable[[AttributeOf], int]) -> Iterator[_Checked]:
    structure = shrunk.structure
    for node in structure.graph.nodes:
        for demand in _demands(node, shrunk):
            if demand.expr is not None and structure.graph.unread(node):  # the op runs all the same
                continue
            expr: Expr = node.sizes.get(demand.argument, demand.original) if demand.expr is None else demand.expr
            yield _Checked(node, demand, expr, evaluate(expr, shrunk.shape, attribute))


def _broken(shrunk: Shrunk, attribute: Callable[[AttributeOf], int]) -> Iterator[Unmet]:
    """Yield comparisons whose outcome would change, so that the code would take another branch or raise."""
    structure = shrunk.structure
    for guard in structure.graph.guards:
        if evaluate(guard.expr, shrunk.shape, attribute) is guard.outcome and _holds_at_all_sizes(
            guard, shrunk, attribute
        ):
            continue
        values = [v for leaf in leaves(guard.expr) for v in _values_of(structure, leaf)]
        layers = [layer.reshape(-1) for v in values for layer in structure.of(v)]
        slots = torch.cat(layers).unique() if layers else torch.zeros(0, dtype=torch.long)
        # Otherwise the code has changed one of its attributes since.
        if _sets(shrunk, guard.expr) or not shrunk.keep[slots].all():
            yield Unmet(guard, f"whether {guard} holds depends on how many channels there are", slots)


_SIZES = (1, 2, 3, 5, 7, 8, 12, 16, 31, 32, 49, 64, 100, 196, 224, 333, 512, 1024, 2049, 4096, 10007, 65536)
"""Sizes for which comparisons of channels with positions are evaluated, besides those next to numbers of channels."""


def _holds_at_all_sizes(guard: Guard, shrunk: Shrunk, attribute: Callable[[AttributeOf], int]) -> bool:
    """Whether the outcome of a comparison of channels with another size stays the same, whatever that size is."""
    structure = shrunk.structure
    shapes = [leaf for leaf in leaves(guard.expr) if isinstance(leaf, ShapeOf)]
    sizes = {(leaf.value.index, leaf.dim) for leaf in shapes if not structure.amounts.is_channel(leaf.value, leaf.dim)}
    if not sizes or len(sizes) == len({(leaf.value.index, leaf.dim) for leaf in shapes}):
        return True
    channels = {shape(leaf.value)[leaf.dim] for leaf in shapes for shape in (shrunk.shape, _recorded)}
    near = {max(n + step, 1) for n in channels for step in (-1, 0, 1)}
    for size in sorted({*_SIZES, *near}):
        for places in (sizes, *({place} for place in sizes)):
            before = evaluate(guard.expr, _with_size(_recorded, places, size), _attribute_of(structure))
            after = evaluate(guard.expr, _with_size(shrunk.shape, places, size), attribute)
            if before is not after:
                return False
    return True


def _recorded(value: Value) -> tuple[int, ...]:
    return value.shape


def _attribute_of(structure: Structure) -> Callable[[AttributeOf], int]:
    return lambda expr: structure.graph.attributes[expr.module][expr.name]


def _with_size(shape: Shapes, places: Collection[tuple[int, int]], size: int) -> Shapes:
    """Return shapes with another size at some (value index, dimension)."""

    def other(value: Value) -> tuple[int, ...]:
        return tuple(size if (value.index, d) in places else n for d, n in enumerate(shape(value)))

    return other


def _sets(shrunk: Shrunk, expr: Expr) -> bool:
    """Whether an expression reads an attribute that is set."""
    attributes = (leaf for leaf in leaves(expr) if isinstance(leaf, AttributeOf))
    return any(leaf.name in shrunk.overrides.get(leaf.module, {}) for leaf in attributes)


def _values_of(structure: Structure, leaf: ShapeOf | AttributeOf) -> Iterator[Value]:
    """Yield the values that a size is read from."""
    if isinstance(leaf, ShapeOf):
        yield leaf.value
    else:
        yield from _values_behind(structure, leaf)


def _pin(shrunk: Shrunk, checked: _Checked) -> Pin | None:
    if math.isnan(checked.number):  # computing it would raise before it reaches the pin
        return None
    structure, node = shrunk.structure, checked.node
    sources = list(leaves(checked.expr))
    if not all(_is_the_same_in_all_calls(structure, leaf) for leaf in sources):
        return None
    owner = structure.graph.types[node.module]
    pin = pin_of(node, checked.demand.argument, checked.demand.wanted, owner)
    return pin if pin is None or sources or is_pinned(owner, pin) else None


def _is_the_same_in_all_calls(structure: Structure, leaf: ShapeOf | AttributeOf) -> bool:
    """Whether a size is a number of channels, or that of a parameter, or of a buffer that no code replaces."""
    if isinstance(leaf, ShapeOf) and leaf.value.stored:
        return leaf.value.name not in structure.graph.changing
    return not isinstance(leaf, ShapeOf) or structure.along(leaf.value, leaf.dim) is not None


def _demands(node: Node, shrunk: Shrunk) -> Iterator[Demand]:
    """The rule's demands, and that a factor computed from sizes (``head_dim ** -0.5``) does not change."""
    rule = shrunk.structure.rules.of(node)
    with rule_errors(node):
        asked = list(rule.demands(node, shrunk.indices, shrunk.shape))
    is_centred = any(True for _ in rule.rare.centre(node, shrunk.structure.graph))
    if is_centred:
        asked = [replace(demand, argument=(CENTRED, demand.argument[1])) for demand in asked]
    yield from asked
    for name, position in node.sizes.keys() - {demand.argument for demand in asked}:
        number = node.args[name]
        if isinstance(number, float):
            yield Demand((name, position), number, number)


def _reason(node: Node, demand: Demand, expr: Expr) -> str:
    if isinstance(expr, Apply) and expr.symbol in COMPARISONS:
        return f"{node!r} depends on whether {describe(expr)}, which it must not when channels are removed"
    written = describe(expr)
    value = f"{written} = {demand.original}" if written != str(demand.original) else written
    return f"{node!r} is given the size {value}, which does not follow when channels are removed"


def _involved(structure: Structure, checked: _Checked) -> Tensor:
    """Return the slots that determine whether a demand is met.

    A size depends on the tensors of its node and on the values it is computed from; a number that must not change
    depends on the latter only.
    """
    node, values = checked.node, []
    stays = checked.demand.wanted == checked.demand.original
    exprs = [checked.expr] if stays else [checked.expr, *node.sizes.values()]
    if not stays:
        values += [*node.inputs, *node.outputs]
    for leaf in (leaf for expr in exprs for leaf in leaves(expr)):
        values += _values_of(structure, leaf)
    layers = [layer.reshape(-1) for v in values for layer in structure.of(v)]
    return torch.cat(layers).unique() if layers else torch.zeros(0, dtype=torch.long)


def _values_behind(structure: Structure, leaf: AttributeOf) -> Iterator[Value]:
    """Yield the values of the ops that set an attribute (``out_channels``); no others change it."""
    for node in structure.graph.nodes:
        if node.module == leaf.module:
            attributes = structure.rules.of(node).attributes(node, lambda value: value.shape)
            yield from (*node.inputs, *node.outputs) if leaf.name in attributes else ()


def asked_numbers(structure: Structure) -> list[tuple[Node, Demand]]:
    """Return all demanded numbers in the code, for a removal of nothing."""
    whole = Shrunk(structure, torch.ones(len(structure.roots), dtype=torch.bool))
    return [(node, demand) for node in structure.graph.nodes for demand in _demands(node, whole)]


def one_number(structure: Structure, asked: Iterable[tuple[Node, Demand]]) -> Iterator[Tensor]:
    """Yield slots, ``(uses, size)``, of dimensions whose sizes come from a single number in the code and so stay equal.

    Such a number is an argument of a call that runs several times, or an attribute if calls cannot be pinned one by
    one.
    """
    uses: dict[tuple[Any, ...], dict[bytes, Tensor]] = {}
    for node, demand in asked:
        if demand.dim is None:
            continue
        slots = structure.along(node.output, demand.dim)
        if slots is None:
            slots = torch.full(node.output.shape[demand.dim : demand.dim + 1], FROZEN)
        owner, expr = structure.graph.types[node.module], node.sizes.get(demand.argument)
        pinned = pin_of(node, demand.argument, demand.wanted, owner) is not None
        by_name = isinstance(expr, AttributeOf) and not pinned
        key = (expr, len(slots)) if by_name else (node.module, node.site, demand.argument, len(slots))
        uses.setdefault(key, {})[slots.numpy().tobytes()] = slots
    rows = (torch.stack(list(distinct_slots.values())) for distinct_slots in uses.values() if len(distinct_slots) > 1)
    yield from (distinct_slots for distinct_slots in rows if not structure.frozen[distinct_slots].all())
