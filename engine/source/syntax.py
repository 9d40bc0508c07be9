"""The nodes of a syntax tree by kind, cached because the same code is analysed for each module of a class."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["TRIES", "compares_with_none", "is_literal_size", "nodes_of", "parents_of", "span_of"]

TRIES = (ast.Try, ast.TryStar)
"""Kinds of statements that catch errors."""


@functools.cache
def nodes_of(tree: ast.AST, *kinds: type[ast.AST]) -> Sequence[Any]:
    """Return the nodes of some kinds in a tree, outer ones first; all nodes if no kind is given.

    Args:
        tree: must not be changed afterwards.
        kinds: classes of nodes.

    Example:
        >>> tree = ast.parse("y = f(x)")
        >>> [node.id for node in nodes_of(tree, ast.Name)], nodes_of(tree) is nodes_of(tree)
        (['y', 'f', 'x'], True)
    """
    return tuple(node for node in ast.walk(tree) if not kinds or isinstance(node, kinds))


@functools.cache
def parents_of(*trees: ast.AST) -> Mapping[ast.AST, ast.AST]:
    """Return the syntax node around each node of some trees.

    Args:
        trees: must not be changed afterwards; nodes around them are unknown.

    Example:
        >>> [call] = nodes_of(tree := ast.parse("y = f(x)"), ast.Call)
        >>> ast.unparse(parents_of(tree)[call]), call in parents_of(call)
        ('y = f(x)', False)
    """
    return {child: node for tree in trees for node in nodes_of(tree) for child in ast.iter_child_nodes(node)}


def span_of(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first and the last line and column of an expression or a statement.

    Args:
        node: of a tree.

    Example:
        >>> span_of(ast.parse("y = f(x)").body[0].value)
        ((1, 4), (1, 8))
    """
    place: Any = node
    return (place.lineno, place.col_offset), (place.end_lineno or place.lineno, place.end_col_offset or 0)


def is_literal_size(size: ast.expr) -> bool:
    """Whether a size, or one of several, contains a literal greater than one and reads no attribute.

    Args:
        size: an argument of a call.

    Example:
        >>> [is_literal_size(ast.parse(text, mode="eval").body) for text in ("(b, 3)", "x.shape[3]", "self.n * 2")]
        [True, False, False]
    """
    if isinstance(size, (ast.Tuple, ast.List)):
        return any(map(is_literal_size, size.elts))
    inner = list(_outside_of_indices(size))
    numbers = (n.value for n in inner if isinstance(n, ast.Constant))
    return any(type(n) is int and n > 1 for n in numbers) and not any(isinstance(n, ast.Attribute) for n in inner)


def _outside_of_indices(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes of an expression, without indices of subscripts: the 3 in ``shape[3]`` is not a size."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Subscript) and child is node.slice):
            yield from _outside_of_indices(child)


def compares_with_none(node: ast.Compare) -> bool:
    """Whether it is ``x is None``, or ``x is not None``.

    Args:
        node: a comparison.

    Example:
        >>> [compares_with_none(ast.parse(text, mode="eval").body) for text in ("x is None", "x == 1")]
        [True, False]
    """
    none = [value for value in node.comparators if isinstance(value, ast.Constant) and value.value is None]
    return len(node.ops) == len(none) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
