"""The nodes of a syntax tree by their kind, looked up once: the same code is asked about for each module of a class."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Any

__all__ = ["TRIES", "nodes_of"]

TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
"""Kinds of statements that catch errors; ``except*`` is of Python 3.11."""


@functools.cache
def nodes_of(tree: ast.AST, *kinds: type[ast.AST]) -> Sequence[Any]:
    """Return the nodes in a tree that are of some kinds, outer ones first; of all kinds where none is named.

    Args:
        tree: is not changed afterwards.
        kinds: classes of nodes.

    Example:
        >>> tree = ast.parse("y = f(x)")
        >>> [node.id for node in nodes_of(tree, ast.Name)], nodes_of(tree) is nodes_of(tree)
        (['y', 'f', 'x'], True)
    """
    return tuple(node for node in ast.walk(tree) if not kinds or isinstance(node, kinds))
