"""The syntax of lambda functions and comprehensions as that of functions."""

from __future__ import annotations

import ast
import sys
from types import CodeType
from typing import Any

import pytest

from engine.flow.branches import branches_of
from engine.source.anonymous import anonymous_function, is_anonymous

FIRST, SECOND = lambda x: x + 1, lambda x: x if x > 3 else -x
OUTER = lambda x: (lambda y: y * 2)(x) + 1  # noqa: E731
SPREAD = lambda x: (  # noqa: E731
    x or 3
)


def _generator(items: Any, extra: Any) -> Any:
    return (x + y for x in items if x > 3 if x < 9 for y in extra)


def _inside(function: Any, name: str) -> CodeType:
    return next(c for c in function.__code__.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _text(code: CodeType) -> str:
    function = anonymous_function(code)
    assert function is not None and function.name == code.co_name and is_anonymous(code.co_name)
    return "\n".join(map(ast.unparse, function.body))


def test_two_lambda_functions_on_a_line() -> None:
    """The columns tell which is which."""
    assert _text(FIRST.__code__) == "return x + 1"
    assert _text(SECOND.__code__) == "return x if x > 3 else -x"


def test_a_lambda_function_inside_of_another() -> None:
    """The text of the outer one is around that of the inner one."""
    assert _text(OUTER.__code__).startswith("return (lambda y: y * 2)(x)")
    assert _text(_inside(OUTER, "<lambda>")) == "return y * 2"


def test_several_lines() -> None:
    """The lambda function begins on another line than what it computes."""
    assert _text(SPREAD.__code__) == "return x or 3"


def test_a_generator() -> None:
    """Conditions and further loops are nested; what Python passes is called `.0`."""
    expected = (
        "for x in .0:\n    if x > 3:\n        if x < 9:\n            for y in extra:\n                return x + y"
    )
    assert _text(_inside(_generator, "<genexpr>")) == expected


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="list and dictionary comprehensions are no functions")
def test_comprehensions() -> None:
    """A dictionary returns pairs."""

    def net(items: Any) -> Any:
        return [x * 1 for x in items], {x: -x for x in items}, {x + 1 for x in items}

    texts = [_text(_inside(net, name)) for name in ("<listcomp>", "<dictcomp>", "<setcomp>")]
    assert texts == [f"for x in .0:\n    return {result}" for result in ("x * 1", "(x, -x)", "x + 1")]


def test_without_a_file() -> None:
    """Code that is typed into an interpreter has no text."""
    assert anonymous_function(eval("lambda x: x").__code__) is None


def test_branches() -> None:
    """Both parts of a conditional expression are branches, and so is the result of a loop."""
    parts = branches_of(SECOND.__code__)
    loop = branches_of(_inside(_generator, "<genexpr>"))
    assert parts is not None and {ast.unparse(b.nodes[0]) for b in parts.branches} == {"x", "-x"}
    assert loop is not None and "return x + y" in {ast.unparse(b.nodes[0]) for b in loop.branches}
