"""Products as equations: their letters, and what influences what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import engine
from engine.ops.equations import Equation, attended, einsum, product
from engine.program.graph import Node

SIZES = {"a": 2, "b": 3, "c": 2, "d": 4, "e": 3}


class Applied(nn.Module):
    """Applies a function to its inputs."""

    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the result."""
        return self.f(*tensors)


def node_of(f: Callable[..., Tensor], op: str, *shapes: Sequence[int]) -> Node:
    """The node of an op in a function of random tensors."""
    graph = engine.trace(Applied(f), tuple(torch.rand(*shape) + 0.1 for shape in shapes))
    [node] = [node for node in graph.nodes if node.op == op]
    return node


def written(equation: Equation | None) -> str:
    """An equation as einsum spells it, with letters in the order in which they appear."""
    assert equation is not None
    letters = dict.fromkeys("".join(factor.letters for factor in equation.factors) + equation.result)
    plain = {ord(letter): chr(ord("a") + number) for number, letter in enumerate(letters)}
    terms = ",".join(factor.letters for factor in equation.factors)
    return f"{terms}->{equation.result}".translate(plain)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((2, 3), (3, 4)), "ab,bc->ac"),
        (((5, 2, 3), (5, 3, 4)), "abc,acd->abd"),
        (((5, 2, 3), (3, 4)), "abc,cd->abd"),
        (((2, 3), (5, 3, 4)), "ab,cbd->cad"),
        (((3,), (5, 3, 4)), "a,bac->bc"),
        (((5, 2, 3), (3,)), "abc,c->ab"),
        (((3,), (3,)), "a,a->"),
    ],
)
def test_products(shapes: tuple[tuple[int, ...], ...], expected: str) -> None:
    """Batches are aligned from the right; vectors have no row, or no column."""
    op = "dot" if shapes == ((3,), (3,)) else "matmul"
    f = torch.matmul
    graph = engine.trace(Applied(f), tuple(torch.rand(*shape) for shape in shapes))
    [node] = [node for node in graph.nodes if node.op in (op, "matmul")]
    assert written(product(node)) == expected


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ij , jk -> ki", ((2, 3), (3, 4)), "ab,bc->ca"),
        ("ij,jk", ((2, 3), (3, 4)), "ab,bc->ac"),
        ("...i,...j->...ij", ((5, 2), (6, 5, 3)), "ab,cad->cabd"),
        ("...i,...i", ((5, 2), (6, 5, 2)), "ab,cab->ca"),
        ("i...->...", ((2, 3, 4),), "abc->bc"),
    ],
)
def test_einsums(equation: str, shapes: tuple[tuple[int, ...], ...], expected: str) -> None:
    """Spaces, results that are not spelled out, and ellipses, which are aligned from the right."""
    assert written(einsum(node_of(lambda *x: torch.einsum(equation, *x), "einsum", *shapes))) == expected


def test_a_diagonal_has_no_equation() -> None:
    """A letter that a factor repeats."""
    assert einsum(node_of(lambda x: torch.einsum("ii->i", x), "einsum", (3, 3))) is None


def test_attention() -> None:
    """Positions are no entries; only the values make the result zero; keys and values may be shared by heads."""
    node = node_of(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        "scaled_dot_product_attention", (1, 4, 3, 6), (1, 2, 5, 6), (1, 2, 5, 7), (4, 3, 5),
    )  # fmt: skip
    equation = attended(node)
    assert written(equation) == "abcd,abed,abef,bce->abcf" and equation is not None
    assert [factor.sharers for factor in equation.factors] == [1, 2, 2, 1]
    assert [factor.linear for factor in equation.factors] == [False, False, True, False]
    assert equation.positions == "qk"


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw an equation with one to three factors, each letter of the result in some of them."""
    letters = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4, unique=True)
    terms = ["".join(draw(letters)) for _ in range(draw(st.integers(1, 3)))]
    every = sorted(set("".join(terms)))
    result = draw(st.permutations([letter for letter in every if draw(st.booleans())]))
    return f"{','.join(terms)}->{''.join(result)}", terms


def described(case: tuple[str, list[str]]) -> tuple[str, list[tuple[int, ...]], Equation]:
    """The text of an equation, the shapes of its factors, and what its node is described as."""
    text, terms = case
    shapes = [tuple(SIZES[letter] for letter in term) for term in terms]
    equation = einsum(node_of(lambda *x: torch.einsum(text, *x), "einsum", *shapes))
    assert equation is not None
    return text, shapes, equation


@settings(max_examples=40, deadline=None)
@given(equations(), st.integers(0, 2**16))
def test_what_is_used_is_what_gradients_reach(case: tuple[str, list[str]], seed: int) -> None:
    """Factors are positive, so no two influences cancel out; any entries of the result may be used."""
    text, shapes, equation = described(case)
    torch.manual_seed(seed)
    factors = [(torch.rand(shape) + 0.1).requires_grad_() for shape in shapes]
    result = torch.einsum(text, *factors)
    used = torch.rand(result.shape) < 0.4
    gradients: Any = torch.autograd.grad((result * used).sum(), factors)
    for factor, tensor, gradient in zip(equation.factors, factors, gradients, strict=True):
        assert torch.equal(equation.back(used, factor).expand(tensor.shape), gradient > 0)


@settings(max_examples=40, deadline=None)
@given(equations(), st.integers(0, 2**16))
def test_a_factor_reaches_the_entries_of_its_letters(case: tuple[str, list[str]], seed: int) -> None:
    """Where a factor is zero along all that is summed over, the result is, and it is nowhere else."""
    text, shapes, equation = described(case)
    torch.manual_seed(seed)
    zero = torch.rand(shapes[0]) < 0.7
    factors = [torch.rand(shape) + 0.1 for shape in shapes]
    result = torch.einsum(text, factors[0].masked_fill(zero, 0.0), *factors[1:])
    first = equation.factors[0]
    for dim in equation.inner(first):
        zero = zero.all(dim, keepdim=True)
    assert torch.equal(equation.into(zero, first).expand(result.shape), result == 0)
