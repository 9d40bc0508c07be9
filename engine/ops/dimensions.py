"""Attention whose head dimensions can go, in place of whole heads: products of activations by entry.

The scores of a head sum over the entries of a query and a key, ``Σ_d q_d k_d``. An entry may go where it is zero in the
queries or in the keys, the same entries in all heads; entries of the values go as any channel does. The number of heads
stays, and so does the factor that scores are multiplied by, although it is mostly computed from the number of entries.

Heads and their dimensions cannot both be slots: what remains of a head has to be a product of the two. One compaction
under each of the two registries removes both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from engine.analysis.propagate import Labels
from engine.analysis.use import Use
from engine.ops import attention, spatial
from engine.ops.products import einsum_layer, or_layer
from engine.program.expressions import Apply, ShapeOf
from engine.program.graph import Node, Value
from engine.rule import Demand, Rule, Shapes, Statistic
from engine.source.pins import SCALE

__all__ = ["RULES"]


def _meet(node: Node, labels: Labels, a: Value, b: Value, dims: tuple[int, int]) -> None:
    """Tie the entries that are multiplied with each other and summed up."""
    known = [labels.along(a, dims[0]), labels.along(b, dims[1])]
    if known[0] is not None and known[1] is not None:
        labels.slots.union(known[0], known[1])
        return
    for found in known:
        if found is not None:
            labels.slots.freeze(found, f"{node!r} contracts it with what has a fixed size")


def _by_entry(node: Node, labels: Labels, value: Value, entries: Sequence[int]) -> None:
    """Of a value, only ``entries`` go, and along each of them the same for whatever else."""
    others = set(range(value.ndim)) - set(entries)
    labels.hold(value, others, f"{node!r} keeps its heads and its positions")
    for dim in entries:
        labels.along(value, dim)


# ---------------------------------------------------------------- products


def _product_labels(node: Node, labels: Labels) -> None:
    """``(…, m, k) @ (…, k, n)``: k is tied, m and n pass, all other dimensions stay whole."""
    a, b = node.inputs[:2]
    if a.ndim < 2 or b.ndim < 2:
        attention.PRODUCT.labels(node, labels)  # of vectors nothing goes, here as there
        return
    for value in (a, b):
        labels.claim(value)
        _by_entry(node, labels, value, (value.ndim - 2, value.ndim - 1))
    _meet(node, labels, a, b, (a.ndim - 1, b.ndim - 2))
    target = node.output
    _pass_row(labels, labels.along(a, a.ndim - 2), target, target.ndim - 2)
    _pass_row(labels, labels.along(b, b.ndim - 1), target, target.ndim - 1)


def _pass_row(labels: Labels, row: Tensor | None, target: Value, dim: int) -> None:
    """Give the result the slots of an operand's dimension, or none for good."""
    if row is None:
        labels.fix(target, dim)
    else:
        labels.add(target, row.view([-1 if d == dim else 1 for d in range(target.ndim)]))


def _varying(use: Use, value: Value, entries: int, place: int, target: Value) -> Tensor:
    """Say of each entry along a dimension whether it is anything but zero, as an array along ``place`` of the target.

    Heads need not be told apart, as entries go in all of them.
    """
    known = (use.constants.plain(value) != 0).movedim(entries, 0)
    row = known.reshape(known.size(0), -1).any(1)
    return row.view([-1 if d == place % target.ndim else 1 for d in range(target.ndim)])


def _product_used(node: Node, use: Use) -> None:
    """An entry that meets zeros only is not used."""
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
    """Return the letters of two operands and of the result; None for what has another number of operands."""
    parsed = attention.letters_of(node)
    return parsed if parsed is not None and len(parsed[0]) == 2 else None


def _einsum_labels(node: Node, labels: Labels) -> None:
    """Letters that are summed over are tied, those of one operand pass, those of both and the result stay whole."""
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
    """Entries of queries and keys are tied, those of the values pass; heads stay."""
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
    """The factor of the scores stays, where the op itself computes it from the width of a head."""
    if node.args["scale"] is None:
        query = node.args["query"]
        factor = 1 / math.sqrt(query.shape[-1])
        yield Demand(SCALE, factor, factor, Apply("/", 1, Apply("sqrt", ShapeOf(query, query.ndim - 1), 0)))


def _entries_first(rule: Rule) -> Rule:
    """Return the rule of a mean or a sum, which in a norm over the entries of a head runs over some that go."""

    def labels(node: Node, labels: Labels) -> None:
        for span in rule.only_zeros(node):
            labels.along(span.input, span.dim)
        rule.labels(node, labels)

    return replace(rule, labels=labels)


def _by_dimension(rule: Rule) -> Rule:
    """Return a rule, by entry where that makes a difference."""
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
