"""Integers that remember where they came from."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import engine
from engine.graph import Value
from engine.sizes import Apply, AttributeOf, Shape, ShapeOf, Size, describe, evaluate, numbers_in, user_site
from tests.engine.nets import Net

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
X = Value(0, (2, 8, 4, 4), torch.float32)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50), st.sampled_from(sorted(OPERATORS)), st.booleans())
def test_arithmetic_is_that_of_int_and_can_be_done_again(a: int, b: int, now: int, symbol: str, swapped: bool) -> None:
    """The number is plain arithmetic's; its expression, evaluated under another size, too."""
    f = OPERATORS[symbol]
    size = Size(a, ShapeOf(X, 1))
    found = f(b, size) if swapped else f(size, b)
    assert found == (f(b, a) if swapped else f(a, b)) and isinstance(found, Size)
    again = evaluate(found.expr, lambda v: (2, now, 4, 4), lambda e: 0)
    assert again == (f(b, now) if swapped else f(now, b))


def test_attributes_are_evaluated() -> None:
    """Under their new values."""
    expr = (Size(8, ShapeOf(X, 1)) // Size(2, AttributeOf("block", "heads"))).expr
    assert evaluate(expr, lambda v: (2, 6), lambda e: {("block", "heads"): 3}[e.module, e.name]) == 2
    assert describe(expr) == "(shape[1] // block.heads)"
    assert describe(Apply("+", AttributeOf("", "n"), 3)) == "(n + 3)"


def test_a_float_knows_its_expression_too() -> None:
    """True division, powers and mixed arithmetic give what int gives, and can be evaluated again."""
    size = Size(8, ShapeOf(X, 1))
    assert size * 0.5 == 4.0 and size**2 == 64 and 1 / size == 0.125
    scale = (size // 2) ** -0.5
    assert scale == 0.5 and evaluate(scale.expr, lambda v: (2, 32), lambda e: 0) == 0.25
    assert type(copy.deepcopy(scale)) is float


def test_copies_and_pickles_are_plain() -> None:
    """Nothing of the recording leaks into what a model stores."""
    size = Size(8, ShapeOf(X, 1))
    assert type(copy.deepcopy(size)) is int and type(pickle.loads(pickle.dumps(size))) is int


def test_shapes_keep_tagged_sizes() -> None:
    """Slices, sums and unpacking of a shape."""
    shape = Shape(Size(n, ShapeOf(X, d)) for d, n in enumerate(X.shape))
    assert isinstance(shape[2:], Shape) and shape[1].expr == ShapeOf(X, 1)
    assert (shape[:1] + (3,))[0].expr == ShapeOf(X, 0) and ((3,) + shape)[2].expr == ShapeOf(X, 1)
    assert shape.numel() == 256 and shape == (2, 8, 4, 4)


def test_numbers_in_arguments() -> None:
    """Nested, in order; booleans are none; slices are looked into."""
    assert list(numbers_in((1, [2, (True, 3)], {"k": 4}, slice(5, None, 6), "7", 8.0))) == [1, 2, 3, 4, 5, 6, 8.0]


def test_the_line_of_the_user() -> None:
    """The innermost frame outside of torch and the engine."""
    assert str(user_site("f")).startswith(__file__)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda m, x: x.view(x.shape[0], -1), ["shape[0]", "-1"]),
        (lambda m, x: x.view(x.size(0), x.size(1) * 16), ["shape[0]", "(shape[1] * 16)"]),
        (lambda m, x: x.view(-1, m.conv.out_channels, 16), ["-1", "conv.out_channels", "16"]),
        (lambda m, x: x.reshape(2, 128), ["2", "128"]),
        (lambda m, x: x.view(x.size()[:2] + (16,)), ["shape[0]", "shape[1]", "16"]),
        (lambda m, x: x.view(2, x[0].numel()), ["2", "(((1 * shape[0]) * shape[1]) * shape[2])"]),
    ],
)
def test_sizes_of_a_recorded_view(view: object, expected: list[str]) -> None:
    """Each integer argument has the expression that the code passed."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return view(m, m.conv(x))

    graph = engine.trace(Net(forward, conv=nn.Conv2d(3, 8, 1)), torch.zeros(2, 3, 4, 4))
    node = next(n for n in graph.nodes if n.op in ("view", "reshape"))
    name = "size" if node.op == "view" else "shape"
    found = [describe(node.sizes.get((name, k), given)) for k, given in enumerate(node.args[name])]
    assert found == expected and "test_sizes.py:" in node.location


def test_two_equal_numbers_keep_their_own_expressions() -> None:
    """A literal 8 beside a shape of 8 stays a literal: matched in order, not by value alone."""
    graph = engine.trace(
        Net(lambda m, x: m.conv(x).view(8, x.shape[0], -1), conv=nn.Conv2d(3, 8, 1)), torch.zeros(8, 3, 2, 2)
    )
    node = next(n for n in graph.nodes if n.op == "view")
    assert ("size", 0) not in node.sizes and describe(node.sizes["size", 1]) == "shape[0]"


def test_a_root_knows_its_expression_while_recording() -> None:
    """`math.sqrt` of a size is traced back to the shape, and is itself again afterwards."""
    plain = math.sqrt
    found = []

    def forward(m: Net, x: Tensor) -> Tensor:
        found.append(math.sqrt(m.conv(x).shape[1]))
        return x

    engine.trace(Net(forward, conv=nn.Conv2d(3, 4, 1)), torch.zeros(1, 3, 2, 2))
    assert math.sqrt is plain and found[0] == 2.0 and describe(found[0].expr) == "sqrt(shape[1])"
    assert evaluate(found[0].expr, lambda v: (1, 9), lambda e: 0) == 3.0


def test_the_side_of_a_number() -> None:
    """A number on the left of an operator with a tensor is known from one on its right, each time."""
    sides = []

    def forward(m: Net, x: Tensor) -> Tensor:
        n = x.shape[1]
        for y in (n * x, x * n, n / x, x / n):
            sides.append(y)
        return sum(sides[1:], sides[0])

    nodes = [n for n in engine.trace(Net(forward), torch.ones(1, 3, 2, 2)).nodes if n.op in ("mul", "div")]
    assert [n.site.reflected for n in nodes] == [True, False, True, False]


def test_comparisons_are_kept_as_guards() -> None:
    """Those of the user's code, each once, with its line; not those that torch makes."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.conv(x)
        for _ in range(3):
            y = y if y.shape[1] >= 8 and y.shape[2] else -y
        return m.norm(y)

    graph = engine.trace(Net(forward, conv=nn.Conv2d(3, 8, 1), norm=nn.BatchNorm2d(8)), torch.zeros(2, 3, 4, 4))
    assert [(describe(g.expr), g.outcome) for g in graph.guards] == [
        ("(shape[1] >= 8)", True),
        ("(shape[2] != 0)", True),
    ]
    assert all("test_sizes.py:" in str(guard) for guard in graph.guards)
    assert [g.outcome for g in graph.guards] == [evaluate(g.expr, lambda v: v.shape, lambda e: 0) for g in graph.guards]


@given(st.integers(-3, 3), st.one_of(st.integers(-3, 3), st.floats(-3, 3)))
def test_comparisons_are_those_of_int(a: int, b: float) -> None:
    """Also with floats, and hashes stay."""
    size = Size(a, ShapeOf(X, 1))
    assert [size < b, size <= b, size == b, size != b, size > b, size >= b] == [
        a < b,
        a <= b,
        a == b,
        a != b,
        a > b,
        a >= b,
    ]
    assert bool(size) == bool(a) and hash(size) == hash(a) and {a: 1}[size] == 1 and size is not None
    assert size != "text" and size != None  # noqa: E711
