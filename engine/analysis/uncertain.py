"""Ops with numeric arguments that neither the source nor sizes determine: what holds for all values of these numbers.

The numbers in ``x * n`` or ``x[:, :n]`` may differ in the next call. Only entries that agree for very different numbers
are constant; along a dimension of which another amount may be taken, everything is used and frozen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.analysis.amounts import none_known, other_amounts
from engine.program.expressions import AttributeOf, Expr, SetLater, leaves
from engine.program.graph import Graph, Node, Value

__all__ = ["Rare", "agreeing", "amounts", "are_spatial", "dims_of", "widened"]

Numbers = Sequence[int | float]
Pairs = Mapping[int, int]


class Rare(Protocol):
    """What is read of the rare part of a rule, which stands above this file."""

    @property
    def preserved(self) -> Callable[[Node, Graph], Pairs]:
        """A function for the pairs of dimensions."""

    @property
    def for_gradients(self) -> Collection[str]:
        """Names of arguments that only gradients depend on."""


_SPATIAL = frozenset(
    """kernel_size stride padding dilation output_padding output_size pooled_height pooled_width
    sampling_ratio""".split()
)
"""Arguments that say how much of the dimensions behind the channels is taken."""

_MARGINS = "pad"
"""Argument with two numbers for each of the last dimensions, from the last one on."""

_PADS = frozenset(["padding", "output_padding", _MARGINS])
"""Those of them that put other entries beside constants."""

_POSITIVE = frozenset(["eps", "momentum"])
"""Numbers that are never negative, whoever chooses them."""

_OTHERS: tuple[Callable[[float], float], ...] = (
    lambda n: 2.9 * n + 0.7,
    lambda n: -0.37 * n - 1.3,
    lambda n: 1e3,
    lambda n: -1e3,
    lambda n: 1e-3,
)


def _typed(node: Node, kinds: Sequence[str]) -> Iterator[str]:
    """Yield the names of a node's arguments that have one of the given schema types."""
    schema = getattr(node.target, "_schema", None)
    for argument in () if schema is None else schema.arguments:
        kind = str(argument.type)
        if any(word in kind for word in kinds) and argument.name in node.args:
            yield argument.name


def _scalars(node: Node, numbers: Numbers) -> list[str]:
    """Return the arguments that enter the computation as scalars and contain one of the numbers."""
    # a number may be passed where a tensor is expected, and a truth value where a number is
    values = {name: node.args[name] for name in _typed(node, ("number", "float", "Scalar", "complex", "Tensor"))}
    return [n for n, v in values.items() if isinstance(v, (int, float)) and v in numbers]


def amounts(node: Node, numbers: Numbers, unread: Collection[str] = ()) -> list[str]:
    """Return the integer arguments (sizes, offsets, indices) that contain one of the numbers.

    Args:
        node: of a graph.
        numbers: those that may be others in another call.
        unread: names of arguments that no output depends on.
    """
    names, whole = [], [number for number in numbers if isinstance(number, int) and not isinstance(number, bool)]
    for name in _typed(node, ("int", "Int")) if whole else ():
        value = node.args[name]
        items = value if isinstance(value, (list, tuple)) else [value]
        places = [p for p, item in enumerate(items) if isinstance(item, int) and item in whole]
        is_amount = "dim" not in name and name not in unread
        if is_amount and any(_is_open(node.sizes.get((name, p)), items[p], whole) for p in places):
            names.append(name)
    return names


def _is_open(expr: Expr | None, number: int, numbers: Numbers) -> bool:
    """Whether no size gives a number of a call, nor an attribute that keeps its value."""
    if expr is None:
        return True
    later = [other for other in numbers if isinstance(other, SetLater)]
    return number in later and any(isinstance(leaf, AttributeOf) for leaf in leaves(expr))


def are_spatial(names: Collection[str]) -> bool:
    """Whether all of some arguments say how much of the dimensions behind the channels is taken.

    Example:
        >>> are_spatial(["stride", "padding"]), are_spatial(["stride", "groups"])
        (True, False)
    """
    return bool(names) and _SPATIAL.issuperset(names)


def dims_of(node: Node, names: Sequence[str], preserved: Pairs) -> tuple[int, ...] | None:
    """Return the dimensions of a node's input that integer arguments apply to; None where these may be all.

    Args:
        node: of a graph.
        names: of the arguments.
        preserved: dimensions of the input that none of them concerns, with those of the output.
    """
    rank = node.inputs[0].ndim if node.inputs else 0
    if preserved:
        return tuple(dim for dim in range(rank) if dim not in preserved)
    if rank > 1 and are_spatial(names):
        axes = max(len(v) if isinstance(v, (list, tuple)) else 2 for v in (node.args[name] for name in names))
        return tuple(range(max(1, min(2, rank - axes)), rank))
    if rank and list(names) == [_MARGINS]:
        return tuple(range(rank - len(node.args[_MARGINS]) // 2, rank))
    named = node.args.get("dim", node.args.get("dims"))
    dims = [named] if isinstance(named, int) else named if isinstance(named, (list, tuple)) else []
    return tuple(dim % rank for dim in dims) if rank and dims else None


def agreeing(
    node: Node,
    numbers: Numbers,
    compute: Callable[[Node], Sequence[Tensor] | None],
    constant_of: Callable[[Value], Tensor],
    preserved: Pairs,
    unread: Collection[str] = (),
) -> Sequence[Tensor] | None:
    """Return the constants of a node's outputs that hold for all values of the numbers, NaN elsewhere.

    Args:
        node: of a graph.
        numbers: those that may be others in another call.
        compute: returns the constants for one choice of numbers.
        constant_of: returns the constants of an input.
        preserved: as in `dims_of`.
        unread: as in `amounts`.
    """
    names = amounts(node, numbers, unread)
    dims = dims_of(node, names, preserved)
    if names and (dims is None or any(constant_of(node.inputs[0]).size(dim) > 1 for dim in dims)):
        return None
    arrays = compute(node)
    for other in _others(node, numbers, names) if arrays is not None and not none_known(arrays) else ():
        try:
            again = compute(other)
        except (ArithmeticError, RuntimeError, ValueError):  # the op rejects such a number
            again = None
        if again is None:
            return None
        arrays = [torch.where(a == b, a, math.nan) for a, b in zip(arrays or (), again, strict=True)]
    return arrays


def _others(node: Node, numbers: Numbers, names: Sequence[str]) -> Iterator[Node]:
    scalars = _scalars(node, numbers)
    for change in _OTHERS if scalars else ():
        changed: dict[str, Any] = {name: change(float(node.args[name])) for name in scalars}
        changed |= {name: abs(number) for name, number in changed.items() if name in _POSITIVE}
        yield replace(node, args={**node.args, **changed})
    pads = {name: node.args[name] for name in names if name in _PADS}
    padded = [(n, at) for n, pad in pads.items() for at in range(len(pad) if isinstance(pad, (list, tuple)) else 1)]
    yield from other_amounts(node, padded) if padded else ()


def widened(
    node: Node, numbers: Numbers, used: Callable[[Value], Tensor], preserved: Pairs, unread: Collection[str] = ()
) -> Iterator[tuple[Value, Tensor | None]]:
    """Yield inputs of a node that takes other amounts in other calls, with the used entries of each; None for all.

    Args:
        node: of a graph.
        numbers: those that may be others in another call.
        used: returns the used entries of an output.
        preserved: as in `dims_of`.
        unread: as in `amounts`.
    """
    if not node.inputs:  # a permutation of as many entries as a batch has, drawn after a read
        return
    dims, source = dims_of(node, amounts(node, numbers, unread), preserved), node.inputs[0]
    for value in node.outputs:
        if preserved:
            entries = used(value)
            for dim in set(range(value.ndim)).difference(preserved.values()):
                entries = entries.any(dim, keepdim=True)
            sizes = {dim: entries.size(other) for dim, other in preserved.items()}
            yield source, entries.reshape([sizes.get(dim, 1) for dim in range(source.ndim)])
        elif dims and value.ndim == source.ndim:
            others = [d for d in range(value.ndim) if value.shape[d] != source.shape[d]]  # of as many boxes, say
            every = functools.reduce(lambda entries, d: entries.any(d, keepdim=True), {*dims, *others}, used(value))
            yield source, every
        elif dims and len(dims) == 1 and value.ndim == source.ndim - 1:
            yield source, used(value).unsqueeze(dims[0])
        else:
            yield from ((other, None) for other in node.inputs)
