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
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops import attention, spatial
from engine.ops.products import einsum_layer, or_layer
from engine.program.expressions import Apply, ShapeOf
from engine.program.graph import Node, Value
from engine.rule import Demand, Rule, Shapes, Statistic
from engine.surgery.edits import SCALE

__all__ = ["RULES"]


def _meet(node: Node, labels: Labels, a: Value, b: Value, dims: tuple[int, int]) -> None:
    """Tie entries that are multiplied with each other and summed."""
    rows = [labels.along(a, dims[0]), labels.along(b, dims[1])]
    if rows[0] is not None and rows[1] is not None:
        labels.slots.union(rows[0], rows[1])
        return
    for row in rows:
        if row is not None:
            labels.slots.freeze(row, f"{node!r} contracts it with what has a fixed size")


def _by_entry(node: Node, labels: Labels, value: Value, entries: Sequence[int]) -> None:
    """Allow removal along the dimensions ``entries`` only, independently of all other dimensions."""
    others = set(range(value.ndim)) - set(entries)
    labels.hold(value, others, f"{node!r} keeps its heads and its positions")
    for dim in entries:
        labels.along(value, dim)


# ---------------------------------------------------------------- products


def _product_labels(node: Node, labels: Labels) -> None:
    """``(…, m, k) @ (…, k, n)``: tie k, propagate m and n, freeze all other dimensions."""
    a, b = node.inputs[:2]
    if a.ndim < 2 or b.ndim < 2:
        attention.PRODUCT.labels(node, labels)  # products with vectors stay frozen, as with whole heads
        return
    for value in (a, b):
        labels.claim(value)
        _by_entry(node, labels, value, (value.ndim - 2, value.ndim - 1))
    _meet(node, labels, a, b, (a.ndim - 1, b.ndim - 2))
    target = node.output
    _pass_row(labels, labels.along(a, a.ndim - 2), target, target.ndim - 2)
    _pass_row(labels, labels.along(b, b.ndim - 1), target, target.ndim - 1)


def _pass_row(labels: Labels, row: Tensor | None, target: Value, dim: int) -> None:
    """Give a dimension of the result the slots of an operand's dimension, or freeze it if there are none."""
    if row is None:
        labels.fix(target, dim)
    else:
        labels.add(target, row.view([-1 if d == dim else 1 for d in range(target.ndim)]))


def _varying(use: Use, value: Value, entries: int, place: int, target: Value) -> Tensor:
    """Which entries along a dimension are not constantly zero, as an array along ``place`` of the target.

    Heads need not be distinguished, since entries are removed from all of them.
    """
    nonzero = (use.constants.plain(value) != 0).movedim(entries, 0)
    row = nonzero.reshape(nonzero.size(0), -1).any(1)
    return row.view([-1 if d == place % target.ndim else 1 for d in range(target.ndim)])


def _product_used(node: Node, use: Use) -> None:
    """Entries that are only multiplied by zeros are not used."""
    a, b = node.inputs[:2]
    used = use[node.output]
    if a.ndim < 2 or b.ndim < 2:
        attention.PRODUCT.use(node, use)
        return
    use.add(a, used.any(-1, keepdim=True) & _varying(use, b, -2, -1, node.output))
    use.add(b, used.any(-2, keepdim=True) & _varying(use, a, -1, -2, node.output))


def _product_entries(node: Node) -> Iterable[Statistic]:
    a, b = node.inputs[:2]
    if a.ndim > 1 and b.ndim > 1:
        yield Statistic(a, a.ndim - 1)
        yield Statistic(b, b.ndim - 2)


# ---------------------------------------------------------------- einsum


def _letters(node: Node) -> tuple[list[str], str] | None:
    """Return the letters of two operands and of the result; None for any other number of operands."""
    parsed = attention.letters_of(node)
    return parsed if parsed is not None and len(parsed[0]) == 2 else None


def _einsum_labels(node: Node, labels: Labels) -> None:
    """Tie letters that are summed over, propagate those of one operand, freeze those shared with the result."""
    parsed = _letters(node)
    if parsed is None:
        for value in (*node.inputs, *node.outputs):
            labels.freeze(value, f"{node!r} is too intricate")
        return
    (left, right), result = parsed
    a, b = node.args["tensors"]
    for value, term, other in ((a, left, right), (b, right, left)):
        labels.claim(value)
        _by_entry(node, labels, value, [d for d, c in enumerate(term) if (c in result) != (c in other)])
    for letter in set(left) & set(right) - set(result):
        _meet(node, labels, a, b, (left.index(letter), right.index(letter)))
    for into, letter in enumerate(result):
        if (letter in left) != (letter in right):
            value, term = (a, left) if letter in left else (b, right)
            _pass_row(labels, labels.along(value, term.index(letter)), node.output, into)


def _einsum_entries(node: Node) -> Iterable[Statistic]:
    parsed = _letters(node)
    if parsed is not None:
        (left, right), result = parsed
        for letter in set(left) & set(right) - set(result):
            for value, term in zip(node.args["tensors"], (left, right), strict=True):
                yield Statistic(value, term.index(letter))


# ---------------------------------------------------------------- scaled dot product attention


def _attention_labels(node: Node, labels: Labels) -> None:
    """Tie entries of queries and keys, propagate those of the values; freeze heads."""
    query, key, value = (node.args[name] for name in ("query", "key", "value"))
    for operand in (query, key, value):
        _by_entry(node, labels, operand, (operand.ndim - 1,))
    if node.args["attn_mask"] is not None:
        labels.freeze(node.args["attn_mask"], f"{node!r} keeps its heads and its positions")
    _meet(node, labels, query, key, (query.ndim - 1, key.ndim - 1))
    _pass_row(labels, labels.along(value, value.ndim - 1), node.output, node.output.ndim - 1)


def _attention_used(node: Node, use: Use) -> None:
    query, key, value = (node.args[name] for name in ("query", "key", "value"))
    used = use[node.output]
    use.add(value, used.any(-2, keepdim=True))
    for one, other in ((query, key), (key, query)):
        use.add(one, used.any() & _varying(use, other, -1, -1, one))
    if node.args["attn_mask"] is not None:
        use.add_all(node.args["attn_mask"])


def _attention_entries(node: Node) -> Iterable[Statistic]:
    for operand in (node.args["query"], node.args["key"]):
        yield Statistic(operand, operand.ndim - 1)


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
    if rule in spatial.RULES:
        return rule if rule.only_zeros is Rule.only_zeros else _entries_first(rule)
    if "matmul" in rule.ops:
        product = replace(attention.PRODUCT, labels=_product_labels, use=_product_used, only_zeros=_product_entries)
        return or_layer(product)
    if "einsum" in rule.ops:
        return or_layer(replace(attention.EINSUM, labels=_einsum_labels, only_zeros=_einsum_entries), einsum_layer)
    if "scaled_dot_product_attention" in rule.ops:
        return replace(
            rule,
            labels=_attention_labels,
            use=_attention_used,
            only_zeros=_attention_entries,
            demands=_attention_demands,
        )
    return rule


RULES = [_by_dimension(rule) for rule in (*attention.RULES, *spatial.RULES)]
