"""Nodes of a syntax tree by kind."""

from __future__ import annotations

import ast

from engine.source.syntax import nodes_of


def test_kinds() -> None:
    """Outer nodes come first; without kinds, all are returned."""
    tree = ast.parse("def f(x):\n    if x:\n        return g(h(x))\n    return x\n")
    calls = [ast.unparse(node) for node in nodes_of(tree, ast.Call)]
    assert calls == ["g(h(x))", "h(x)"] and not nodes_of(tree, ast.Try)
    assert nodes_of(tree) == tuple(ast.walk(tree))
    assert {type(node) for node in nodes_of(tree, ast.If, ast.Return)} == {ast.If, ast.Return}


def test_a_tree_is_searched_once() -> None:
    """Other trees of the same code are others."""
    one, other = ast.parse("x"), ast.parse("x")
    assert nodes_of(one, ast.Name) is nodes_of(one, ast.Name)
    assert nodes_of(one, ast.Name)[0] is not nodes_of(other, ast.Name)[0]
