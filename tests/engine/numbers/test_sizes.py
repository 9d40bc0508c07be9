"""Integers that remember where they came from."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import engine
from engine.numbers.sizes import RECORDINGS, Scalar, Shape, Size, numbers_in
from engine.program.expressions import ShapeOf, describe, evaluate
from engine.program.graph import Value
from tests.engine.exactness import channel_masks, masked, randomised, relative_error, run

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


@given(st.sampled_from([int, float]), st.integers(-3, 3), st.one_of(st.integers(-3, 3), st.floats(-3, 3)))
def test_comparisons_are_those_of_plain_numbers(kind: type, a: int, b: float) -> None:
    """Of ints and floats, and hashes stay."""
    size: Size | Scalar = Size(a, ShapeOf(X, 1)) if kind is int else Scalar(a / 2, ShapeOf(X, 1))
    a = kind(a) if kind is int else a / 2
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


@given(st.integers(-9, 9), st.integers(1, 9))
def test_what_plain_numbers_can_do(a: int, b: int) -> None:
    """Conversions, rounding, bits: the same results."""
    size, part = Size(a, ShapeOf(X, 1)), Scalar(a / b, ShapeOf(X, 1))
    for f in (int, float, hash, abs, math.floor, math.ceil, math.trunc, round, operator.neg, operator.pos, str, repr):
        assert f(size) == f(a) and f(part) == f(a / b), f
    assert (
        round(part, 1) == round(a / b, 1) and divmod(size, b) == divmod(a, b) and divmod(a, Size(b, 0)) == divmod(a, b)
    )
    assert [size & b, b & size, size | b, size ^ b, size << b, b << abs(size), size >> 1, ~size] == [
        a & b,
        b & a,
        a | b,
        a ^ b,
        a << b,
        b << abs(a),
        a >> 1,
        ~a,
    ]
    assert size.bit_length() == a.bit_length() and part.is_integer() == (a / b).is_integer()
    assert type(int(size)) is int and type(float(part)) is float and RECORDINGS == []


def test_rounding_can_be_done_again() -> None:
    """``-(-c // 3)``, ``math.ceil(c / 3)``, ``round(c / 4)``: their expressions, under another size."""
    size = Size(8, ShapeOf(X, 1))
    found = [-(-size // 3), math.ceil(size / 3), math.floor(size / 3), round(size / 3)]
    assert found == [3, 3, 2, 3] and describe(found[1].expr) == "ceil((shape[1] / 3))"
    assert [evaluate(n.expr, lambda v: (2, 5), lambda e: 0) for n in found] == [2, 2, 1, 2]


class _Translation(nn.Module):
    """An encoder and a decoder in one layer of torch, which compares widths with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        self.middle = nn.Transformer(8, 2, 1, 1, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(self.middle(h, h[:, :1]))  # type: ignore[no-any-return]


def test_a_width_that_a_layer_of_torch_checks() -> None:
    """The number follows where all of the stream loses channels."""
    model, example = randomised(_Translation()), torch.zeros(2, 5, 4, dtype=torch.float64)
    masks = engine.fix_mask_conflict(channel_masks(model, 0, amount=0.9), model, example)
    reference = masked(model, masks)
    engine.ModelSpeedup(model, example, masks).speedup_model()
    assert model.middle.d_model == model.enter.out_features < 8
    batch = torch.randn(3, 7, 4, dtype=torch.float64)
    assert relative_error(run(reference, batch), run(model, batch)) <= 1e-9
