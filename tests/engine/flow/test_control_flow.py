"""What runs for certain, and what only if something decides so."""

from __future__ import annotations

import ast
import textwrap

import pytest

from engine.flow.control_flow import always_run, conditional_parts, may_leave, unconditional_parts

CERTAIN = {
    "everything in a row": ("a()\nb(c)", "abc"),
    "the test of a condition": ("if a: b()\nelse: c()\nd()", "ad"),
    "the first of several conditions": ("a and b and c", "a"),
    "the test of a choice": ("x = b if a else c", "ax"),
    "what is looped over": ("for a in b:\n  c()\nelse: d()\ne()", "abe"),
    "the test of a loop": ("while a: b()\nc()", "ac"),
    "nothing of a function": ("def f(): a()\nb()", "b"),
    "nothing of a comprehension": ("{a for b in c}\n[a for b in c]\nd()", "d"),
    "nothing of a lambda": ("lambda: a\nb()", "b"),
    "nothing of what may fail": ("try: a()\nexcept E: b()\nc()", "c"),
    "nothing of an assertion": ("assert a, b\nc()", "c"),
    "no case of a match": ("match a:\n  case 1: b()\n  case _: c()\nd()", "ad"),
    "what is in a context": ("with a: b()\nc()", "abc"),
    "nothing behind a return": ("a()\nreturn b\nc()", "ab"),
    "nothing behind an early return": ("if a: return b\nc()", "a"),
    "nothing behind what leaves a loop": ("for a in b:\n  if c: break\nd()", "ab"),
    "nothing behind a return in a context": ("with a:\n  return b\nc()", "ab"),
}


def body(code: str) -> list[ast.stmt]:
    """Statements of a function."""
    function = ast.parse("def run():\n" + textwrap.indent(code, " ")).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.body


@pytest.mark.parametrize("name", CERTAIN)
def test_what_runs_for_certain(name: str) -> None:
    """Of each kind of statement and expression; what follows a statement that may leave need not run."""
    code, expected = CERTAIN[name]
    names = {node.id for node in always_run(body(code)) if isinstance(node, ast.Name)}
    assert names == set(expected)


def test_alternatives_and_what_runs_are_all_there_is() -> None:
    """Each part of a statement that can be passed over is either an alternative or runs with it, never both."""
    for code in ("if a: b\nelse: c", "for a in b: c", "while a: b", "a and b", "try: a\nexcept E: b\nelse: c"):
        (statement,) = body(code)
        node = statement.value if isinstance(statement, ast.Expr) else statement
        blocks = [b if isinstance(b, list) else [b] for _, b in conditional_parts(node)]
        inside = [id(part) for block in blocks for part in block]
        assert inside and not {*inside} & {id(part) for part in unconditional_parts(node)}


def test_what_leaves() -> None:
    """A return inside, at any depth, but of no function inside."""
    assert may_leave(body("if a:\n  for b in c:\n    break")[0]) and not may_leave(body("def f(): return 1")[0])


def test_a_check_that_raises_hides_nothing() -> None:
    """Behind it the code runs, or nothing is computed; behind a condition that returns it need not run."""
    checked, returned = (
        [node.id for node in always_run(ast.parse(f"if a:\n    {way}\nb()").body) if isinstance(node, ast.Name)]
        for way in ("raise c", "return c")
    )
    assert sorted(checked) == ["a", "b"] and sorted(returned) == ["a"]
