"""What functions of a few plain statements branch on, and return."""

from __future__ import annotations

import ast

import pytest

from engine.flow.plain_functions import (
    bound_arguments,
    expressions_in,
    only_branches,
    only_compared_with_none,
    only_result,
)


def _function(body: str, arguments: str = "x, y=None") -> ast.FunctionDef:
    tree = ast.parse(f"def f({arguments}):\n    " + body.replace("\n", "\n    "))
    assert isinstance(tree.body[0], ast.FunctionDef)
    return tree.body[0]


@pytest.mark.parametrize(
    ("body", "plain"),
    [
        ("if x:\n    y = 1\nreturn y", True),
        ("'''Documented.'''\nreturn x", True),
        ("x.y = 1", False),
        ("for y in x:\n    pass", False),
        ("if x:\n    del y", False),
    ],
)
def test_statements_that_only_branch(body: str, plain: bool) -> None:
    """They branch, assign to variables or return, and do nothing else."""
    assert all(map(only_branches, _function(body).body)) is plain


def test_expressions_of_a_body() -> None:
    """Conditions, assigned values and results, of inner statements too."""
    tree = _function("if x:\n    y = x + 1\nelse:\n    return 2\nreturn y")
    assert [ast.unparse(expr) for expr in expressions_in(tree.body)] == ["x", "x + 1", "2", "y"]


def test_the_only_result() -> None:
    """None where the function does anything else."""
    result = only_result(_function("'''Documented.'''\nreturn x is None"))
    assert result is not None and ast.unparse(result) == "x is None"
    assert only_result(_function("y = x\nreturn y")) is None


def test_arguments_of_a_call() -> None:
    """By name; None where a call unpacks some, or the function takes any number."""
    [call] = [n for n in ast.walk(ast.parse("f(a, y=b)")) if isinstance(n, ast.Call)]
    bound = bound_arguments(_function("return x"), call)
    assert bound is not None and {name: ast.unparse(value) for name, value in bound.items()} == {"x": "a", "y": "b"}
    assert bound_arguments(_function("return x", "*x"), call) is None
    [unpacked] = [n for n in ast.walk(ast.parse("f(*a)")) if isinstance(n, ast.Call)]
    assert bound_arguments(_function("return x"), unpacked) is None


def test_variables_that_are_only_compared_with_none() -> None:
    """Not those that an expression reads as well."""
    result = ast.parse("x is None and (y is None or y > 1)", mode="eval").body
    assert only_compared_with_none(result) == {"x"}
