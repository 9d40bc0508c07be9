"""Attention that loses head dimensions instead of whole heads.

The scores of a head sum over the entries of a query and a key, ``Σ_d q_d k_d``. An entry can be removed where it is
zero in the queries or in the keys, the same entries in all heads; entries of the values are removed like any channel.
The number of heads stays, and so does the factor that scales the scores, although it is usually computed from the head
size.

Heads and their dimensions cannot both be slots: what remains of the attention has to be a product of the two. To remove
both, compact once under each of the two registries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops import attention, reductions, spatial
from engine.ops.contraction import once
from engine.ops.equations import Describe, Equation, Factor, attended, einsum, product
from engine.ops.products import einsum_layer, or_layer
from engine.program.expressions import Apply, ShapeOf
from engine.program.graph import Node, Value
from engine.rule import Demand, Rule, Shapes, Statistic
from engine.surgery.edits import SCALE

__all__ = ["RULES"]


def _by_entry(rule: Rule, describe: Describe, **fields: Any) -> Rule:
    """Return the rule of a product that removes entries from all heads where one of the factors is zero.

    Letters that are summed over are tied between factors, those of one factor propagate, and those that factors share
    with the result stay: heads and positions.
    """
    equation_of = once(describe)

    def labels(node: Node, labels: Labels) -> None:
        equation = equation_of(node)
        if equation is None:
            rule.labels(node, labels)
        else:
            _label(node, labels, equation)

    def use(node: Node, use: Use) -> None:
        equation = equation_of(node)
        if equation is None:
            rule.use(node, use)
            return
        for factor in equation.factors:
            used = equation.back(use[node.output], factor)
            for letter, partners in _met(equation, factor):
                for other in partners:
                    used = used & _varying(use, other, letter, factor)
            use.add(factor.value, used)

    def entries(node: Node) -> Iterable[Statistic]:
        if equation := equation_of(node):
            for factor in equation.factors:
                yield from (Statistic(factor.value, factor.dim(letter)) for letter, _ in _met(equation, factor))

    return replace(rule, labels=labels, use=use, only_zeros=entries, **fields)


def _others(equation: Equation, factor: Factor, letter: str) -> list[Factor]:
    return [other for other in equation.factors if other is not factor and letter in other.letters]


def _met(equation: Equation, factor: Factor) -> Iterator[tuple[str, list[Factor]]]:
    """Yield the letters of a factor that are summed over together with other factors, and these."""
    for letter in factor.letters:
        others = _others(equation, factor, letter)
        if others and letter not in equation.result and letter not in equation.positions:
            yield letter, others


def _label(node: Node, labels: Labels, equation: Equation) -> None:
    for factor in equation.factors:
        labels.claim(factor.value)
        free = [c for c in factor.letters if (c in equation.result) != bool(_others(equation, factor, c))]
        dims = {factor.dim(letter) for letter in free if letter not in equation.positions}
        labels.hold(factor.value, set(range(factor.value.ndim)) - dims, f"{node!r} keeps its heads and its positions")
        for dim in dims:
            labels.along(factor.value, dim)
    for factor in equation.factors:
        for letter, others in _met(equation, factor):
            for other in others:
                _meet(node, labels, (factor, other), letter)
        for dim, letter in enumerate(equation.result):
            if letter in factor.letters and letter not in equation.positions:
                if not _others(equation, factor, letter):
                    _pass_row(labels, labels.along(factor.value, factor.dim(letter)), equation.output, dim)


def _meet(node: Node, labels: Labels, factors: tuple[Factor, Factor], letter: str) -> None:
    """Tie entries that are multiplied with each other and summed."""
    rows = [labels.along(factor.value, factor.dim(letter)) for factor in factors]
    if rows[0] is not None and rows[1] is not None:
        labels.slots.union(rows[0], rows[1])
        return
    for row in rows:
        if row is not None:
            labels.slots.freeze(row, f"{node!r} contracts it with a tensor of fixed size")


def _pass_row(labels: Labels, row: Tensor | None, target: Value, dim: int) -> None:
    """Give a dimension of the result the slots of a factor's dimension, or freeze it if there are none."""
    if row is None:
        labels.fix(target, dim)
    else:
        labels.add(target, row.view([-1 if d == dim else 1 for d in range(target.ndim)]))


def _varying(use: Use, other: Factor, letter: str, factor: Factor) -> Tensor:
    """Which entries of another factor along a letter are not constantly zero, as an array of the factor.

    Heads need not be distinguished, since entries are removed from all of them.
    """
    nonzero = (use.constants.plain(other.value) != 0).movedim(other.dim(letter), 0)
    row = nonzero.reshape(nonzero.size(0), -1).any(1)
    return row.view([-1 if d == factor.dim(letter) else 1 for d in range(factor.value.ndim)])


def _attention_demands(node: Node, kept: object, shapes: Shapes) -> Iterable[Demand]:
    """Keep the scale factor as recorded, where the op computes it from the head size."""
    if node.args["scale"] is None:
        query = node.args["query"]
        factor = 1 / math.sqrt(query.shape[-1])
        yield Demand(SCALE, factor, factor, Apply("/", 1, Apply("sqrt", ShapeOf(query, query.ndim - 1), 0)))


def _entries_first(rule: Rule) -> Rule:
    """Return the rule of a mean or sum, which in a norm over head dimensions spans removable entries."""

    def labels(node: Node, labels: Labels) -> None:
        for span in rule.only_zeros(node):
            labels.along(span.input, span.dim)
        rule.labels(node, labels)

    return replace(rule, labels=labels)


def _by_dimension(rule: Rule) -> Rule:
    """Return the rule by head dimension where it differs from the one by head."""
    if rule in (*reductions.RULES, *spatial.RULES):
        return rule if rule.only_zeros is Rule.only_zeros else _entries_first(rule)
    if "matmul" in rule.ops:
        return or_layer(_by_entry(attention.PRODUCT, product))
    if "einsum" in rule.ops:
        return or_layer(_by_entry(attention.EINSUM, einsum), einsum_layer)
    if rule is attention.ATTENTION:
        return _by_entry(rule, attended, demands=_attention_demands)
    return rule


RULES = [_by_dimension(rule) for rule in (*attention.RULES, *reductions.RULES, *spatial.RULES)]
