"""Expressions of sizes, and what they come to under other sizes."""

from __future__ import annotations

import math

import pytest
import torch

from engine.numbers.sizes import Size
from engine.program.expressions import Apply, AttributeOf, ShapeOf, describe, evaluate, leaves
from engine.program.graph import Value

X = Value(0, (2, 8, 4, 4), torch.float32)


def test_attributes_are_evaluated() -> None:
    """Under their new values."""
    expr = (Size(8, ShapeOf(X, 1)) // Size(2, AttributeOf("block", "heads"))).expr
    assert evaluate(expr, lambda v: (2, 6), lambda e: {("block", "heads"): 3}[e.module, e.name]) == 2
    assert describe(expr) == "(shape[1] // block.heads)"
    assert describe(Apply("+", AttributeOf("", "n"), 3)) == "(n + 3)"


@pytest.mark.parametrize("symbol", ["ceil", "exp", "floor", "log", "log10", "log2", "neg", "round", "sqrt", "trunc"])
def test_functions_of_one_number(symbol: str) -> None:
    """They are evaluated and described by their name, and depend on what is inside."""
    expr = Apply(symbol, Apply("/", ShapeOf(X, 1), 3), 0)
    plain = {"neg": lambda x: -x, "round": round}.get(symbol) or getattr(math, symbol)
    assert evaluate(expr, lambda v: (2, 7), lambda e: 0) == plain(7 / 3)
    assert describe(expr) == f"{symbol}((shape[1] / 3))" and list(leaves(expr)) == [ShapeOf(X, 1)]


def test_comparisons() -> None:
    """A comparison is an expression too, and comes to a bool."""
    expr = Apply(">=", ShapeOf(X, 1), AttributeOf("a", "width"))
    found = [evaluate(expr, lambda v: (2, 4), lambda e, width=width: width) for width in (4, 5)]  # type: ignore[misc]
    assert found == [True, False]
    assert describe(expr) == "(shape[1] >= a.width)"


@pytest.mark.parametrize(
    "expr",
    [
        Apply("/", 1, 0),
        Apply("ceil", Apply("/", 1, 0), 0),
        Apply("log", 0, 0),
        Apply("sqrt", -1, 0),
        Apply("**", -1, 0.5),
        Apply("exp", 10**6, 0),
    ],
    ids=describe,
)
def test_what_is_not_defined(expr: Apply) -> None:
    """NaN, also where it is rounded to an integer, as code does that works out a padding."""
    assert math.isnan(evaluate(expr, lambda value: value.shape, lambda attribute: 0))
