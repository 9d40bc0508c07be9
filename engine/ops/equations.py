"""Products of activations as equations: ``bqd,bkd->bqk``.

Each dimension has a letter, the same one where sizes agree, and letters that the result lacks are summed over. One
function per analysis reads an equation, whichever op it describes: matrix products, einsum, and attention, where a
softmax lies between two products.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.contraction import once
from engine.program.arrays import support
from engine.program.graph import Node, Value
from engine.rule import Rule, Shapes

__all__ = ["Describe", "Equation", "Factor", "attended", "einsum", "product", "product_rule", "spelled"]

_BATCH = "".join(letter for letter in string.ascii_letters if letter not in "dkmnqv")


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of a product.

    Attributes:
        value: the factor.
        letters: the letters of its dimensions.
        sharers: number of heads of the result that share one of its own, which are its third dimension from the end.
        linear: whether the result is zero where the factor is; a softmax of zeros is not.
    """

    value: Value
    letters: str
    sharers: int = 1
    linear: bool = True

    def repeated(self, array: Tensor) -> Tensor:
        """Repeat the entries of shared heads for all heads of the result."""
        return array if self.sharers == 1 or array.size(-3) == 1 else array.repeat_interleave(self.sharers, -3)

    def pooled(self, used: Tensor) -> Tensor:
        """Reduce over the heads of the result: a shared head is marked if any of those that share it is."""
        return used if self.sharers == 1 or used.size(-3) == 1 else used.unflatten(-3, (-1, self.sharers)).any(-3)

    def dim(self, letter: str) -> int:
        """Return the dimension of a letter."""
        return self.letters.index(letter)


@dataclass(frozen=True, eq=False)
class Equation:
    """The result of a node as a sum of products.

    Attributes:
        factors: the factors.
        output: the result.
        result: the letters of its dimensions.
        positions: letters of tokens that attend to each other; no entry along them can be removed.
    """

    factors: tuple[Factor, ...]
    output: Value
    result: str
    positions: str = ""

    def inner(self, factor: Factor) -> list[int]:
        """Return the dimensions of a factor that are summed over, or hold positions."""
        return [d for d, letter in enumerate(factor.letters) if letter not in self.result or letter in self.positions]

    def into(self, array: Tensor, factor: Factor) -> Tensor:
        """Permute a factor's array, of size 1 along what is summed over, to the order of the result."""
        array, letters = factor.repeated(array), factor.letters
        order = [factor.dim(letter) for letter in self.result if letter in letters]
        order += [d for d, letter in enumerate(letters) if letter not in self.result]
        sizes = dict(zip(letters, array.shape, strict=True))
        return array.permute(order).reshape([sizes.get(letter, 1) for letter in self.result])

    def back(self, used: Tensor, factor: Factor) -> Tensor:
        """Reduce an array of the result to the letters of a factor, of size 1 along what is summed over."""
        absent = [d for d, letter in enumerate(self.result) if letter not in factor.letters]
        for dim in absent:
            used = used.any(dim, keepdim=True)
        order = [self.result.index(letter) for letter in factor.letters if letter in self.result]
        sizes = dict(zip(self.result, used.shape, strict=True))
        used = used.permute(order + absent).reshape([sizes.get(letter, 1) for letter in factor.letters])
        return factor.pooled(used)


Describe = Callable[[Node], Equation | None]


# ---------------------------------------------------------------- ops as equations


def product(node: Node) -> Equation:
    """Describe the product of the last two inputs: ``(…, m, k) @ (…, k, n)``; vectors lack m, or n."""
    left, right = node.inputs[-2:]
    row, column = "m" * (left.ndim > 1), "n" * (right.ndim > 1)
    batch = _BATCH[: node.output.ndim - len(row + column)]
    factors = Factor(left, _aligned(batch, left, row + "k")), Factor(right, _aligned(batch, right, "k" + column))
    return Equation(factors, node.output, batch + row + column)


def _aligned(batch: str, value: Value, own: str) -> str:
    """Return the letters of a value that ends with ``own``; its batch dimensions are aligned from the right."""
    return batch[len(batch) - value.ndim + len(own) :] + own


def einsum(node: Node) -> Equation | None:
    """Describe an einsum; None for one with a letter that is repeated within a factor."""
    inputs, arrow, result = node.args["equation"].replace(" ", "").partition("->")
    values = node.args["tensors"]
    terms = [spelled(term, value) for term, value in zip(inputs.split(","), values, strict=True)]
    if arrow:
        result = spelled(result, node.output)
    else:
        letters = "".join(terms)
        unique = "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c.isascii()))
        result = spelled("..." * (not letters.isascii()) + unique, node.output)
    if any(len(set(term)) < len(term) for term in (*terms, result)):
        return None
    return Equation(tuple(map(Factor, values, terms)), node.output, result)


def spelled(term: str, value: Value) -> str:
    """Expand an ellipsis into Greek letters, aligned from the right."""
    count = value.ndim - len(term) + 3
    return term.replace("...", "".join(map(chr, range(0x3C9 - count + 1, 0x3CA))))


def attended(node: Node) -> Equation | None:
    """Describe scaled dot product attention; None if the numbers of heads of its arguments do not match."""
    query, key, value = (node.args[name] for name in ("query", "key", "value"))
    mask, batch = node.args["attn_mask"], _BATCH[: query.ndim - 2]
    sharers = [_sharers(query, operand) for operand in (key, value)]
    if 0 in sharers:
        return None
    factors = [
        Factor(query, batch + "qd", linear=False),
        Factor(key, batch + "kd", sharers[0], linear=False),
        Factor(value, batch + "kv", sharers[1]),
    ]
    if mask is not None:
        factors.append(Factor(mask, _aligned(batch, mask, "qk"), linear=False))
    return Equation(tuple(factors), node.output, batch + "qv", positions="qk")


def _sharers(query: Value, other: Value) -> int:
    """Return how many query heads share one head of the keys or values; 0 if the numbers of heads do not match."""
    if query.ndim < 4 or query.shape[:-3] != other.shape[:-3]:
        return int(query.shape[:-2] == other.shape[:-2])
    heads, shared = query.shape[-3], max(other.shape[-3], 1)
    return heads // shared if heads % shared == 0 else 0


# ---------------------------------------------------------------- what the analyses read


def product_rule(ops: tuple[str, ...], describe: Describe, **fields: Any) -> Rule:
    """Return the rule of ops that multiply activations and sum.

    Letters of the result propagate and are tied between factors. What is summed over is frozen, because no weight says
    which of its entries matter.

    Args:
        ops: names of the ops.
        describe: returns the equation of a node; None freezes whatever takes part.
        fields: other fields of the rule, or other values for those that follow from the equation.
    """
    equation_of = once(describe)

    def labels(node: Node, labels: Labels) -> None:
        equation = equation_of(node)
        if equation is None:
            for value in (*node.inputs, *node.outputs):
                labels.freeze(value, f"{node!r} is too complex to follow")
        else:
            _label(node, labels, equation)

    def constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
        equation = equation_of(node)
        return None if equation is None else [_constant(constants, equation)]

    def use(node: Node, use: Use) -> None:
        equation = equation_of(node)
        if equation is None:
            Rule.use(node, use)
        else:
            for factor in equation.factors:
                use.add(factor.value, equation.back(use[node.output], factor))

    def macs(node: Node, shapes: Shapes) -> int:
        equation = equation_of(node)
        return 0 if equation is None else _multiplications(equation, shapes)

    return replace(Rule(ops, labels, constants, use, macs), **fields)


def _label(node: Node, labels: Labels, equation: Equation) -> None:
    for factor in equation.factors:
        labels.claim(factor.value)
    for factor in equation.factors:
        for layer in labels.without(factor.value, equation.inner(factor), f"{node!r} contracts it"):
            labels.add(equation.output, equation.into(layer, factor))
    for factor in equation.factors:
        slotted = {factor.letters[d] for layer in labels.layers(factor.value) for d in support(layer)}
        spanned = {c for c, size in zip(factor.letters, factor.value.shape, strict=True) if size > 1} - slotted
        fixed = {d for d, letter in enumerate(equation.result) if letter in spanned}
        labels.hold(equation.output, fixed, f"{node!r} combines it with a tensor of fixed size")


def _constant(constants: Constants, equation: Equation) -> Tensor:
    """Zero where a factor is zero along all that is summed over."""
    result = torch.full([1] * equation.output.ndim, math.nan, dtype=torch.float64)
    for factor in equation.factors:
        if factor.linear:
            zero = constants.plain(factor.value) == 0
            for dim in equation.inner(factor):
                zero = zero.all(dim, keepdim=True)
            result = torch.where(equation.into(zero, factor), 0.0, result)
    return result


def _multiplications(equation: Equation, shapes: Shapes) -> int:
    """The product of all sizes, once for each factor but one."""
    sizes: dict[str, int] = {}
    for factor in equation.factors:
        for letter, size in zip(factor.letters, shapes(factor.value), strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return math.prod(sizes.values()) * (len(equation.factors) - 1)
