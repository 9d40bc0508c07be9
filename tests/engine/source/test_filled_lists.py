"""Lists that nothing but the function that creates them can change."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.source.filled_lists import fillers, is_only_filled


@pytest.mark.parametrize(
    ("rest", "is_filled"),
    [
        ("x.append(a)", True),
        ("b = len(x) if x and not x[0] else [*x]", True),
        ("for y in x: cat(x)", True),
        ("return x", True),
        ("return {1: (a, x)} if x else a", True),
        ("for y in (x, a): y.append(a)", False),
        ("yield x", False),
        ("x.extend(a)", False),
        ("b = x.append", False),
        ("b = x or a", False),
        ("b = a if a else x", False),
        ("x = a", False),
        ("x[0] = a", False),
        ("f(x)", False),
        ("f(b=x)", False),
        ("b.x = [x]", False),
        ("with a as x: pass", False),
        ("try: a\nexcept E as x: pass", False),
        ("import a as x", False),
        ("match a:\n case [*x]: pass", False),
        ("def f(): x.append(a)", False),
    ],
)
def test_what_may_change_a_list(rest: str, is_filled: bool) -> None:
    """All that is not known to read it may."""
    tree = ast.parse(f"x = []\n{rest}")
    assert is_only_filled(tree, "x", lambda function: ast.unparse(function) == "cat") is is_filled


def test_lists_in_an_assignment_of_several() -> None:
    """Each is the list of one variable, unless all of them share it."""
    tree = ast.parse("a, (x, y) = b, ([], [])\nx.append(a)\ny = z = []")
    assert [is_only_filled(tree, name, lambda f: False) for name in "axyz"] == [False, True, False, False]


def test_a_list_of_unknown_origin() -> None:
    """An argument, or a list that is not created empty."""
    assert not any(
        is_only_filled(ast.parse(text), "x", lambda f: False) for text in ("len(x)", "x = [a]", "x = y = []")
    )


class Tokens(nn.Module):
    """Puts a token in front of each sequence, as a library expands it: all sizes but one stay."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.token = nn.Parameter(torch.rand(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of all tokens."""
        h = self.enter(x)
        repeats = [-1] * h.ndim
        repeats[0] = h.shape[0]
        y: Tensor = self.leave(torch.cat((self.token.expand(repeats), h), 1))
        return y


def test_what_a_list_is_filled_with_is_a_literal() -> None:
    """The sizes that it keeps are no numbers that another call may choose."""
    reasons = {g.name: g.reason for g in engine.dependency_groups(Tokens(), torch.rand(2, 5, 6))}
    assert reasons["enter"] is None


def test_numbers_that_a_list_is_filled_with() -> None:
    """Negative ones only, of the variable itself."""
    tree = ast.parse("a = [-1, 3] * n\na[0] = k\nb = [-2] * n\nc = [-3]")
    assert [sorted(fillers(tree, name)) for name in "abc"] == [[-1], [-2], []]
