"""Which expression a function is evaluating."""

from __future__ import annotations

import ast
import sys

import pytest

from engine.source.expressions_at import expression_at, file_syntax, is_literal, operands_of


class Chain:
    """Calls that follow each other, over lines."""

    def step(self, *numbers: int) -> Chain:
        """Note what its caller is evaluating."""
        frame = sys._getframe(1)
        place = expression_at(frame.f_code, frame.f_lasti)
        self.literals = [ast.literal_eval(expr) for expr in operands_of(place) if is_literal(expr)]
        return self


def test_each_call_of_a_chain() -> None:
    """One that begins on another line than its object has a position of its own."""
    chain = Chain()
    first = chain.step(1, -2).literals
    second = (
        chain.step(3)
        .step(
            4,
            5,
        )
        .literals
    )
    assert (first, second) == ([1, -2], [4, 5])


def test_code_without_a_source() -> None:
    """Nothing can be looked up."""
    code = compile("1 + 2", "<nowhere>", "exec")
    assert expression_at(code, 0) is None and not file_syntax(code).functions


@pytest.mark.parametrize(("text", "literal"), [("1", True), ("-1", True), ("+1", False), ("n", False), ("'a'", True)])
def test_literals(text: str, literal: bool) -> None:
    """Constants and negative numbers."""
    assert is_literal(ast.parse(text, mode="eval").body) is literal


class Setting:
    """Has an attribute that a function copies, and one that a function sets."""

    copied, changed = 1, 2


def freeze(old: Setting) -> Setting:
    """Return a copy."""
    new = Setting()
    new.copied = old.copied
    new.changed = old.copied
    return new


def test_what_is_copied_is_not_set() -> None:
    """It is what it was in another object."""
    names = file_syntax(freeze.__code__).attributes_set_later
    assert "changed" in names and "copied" not in names
