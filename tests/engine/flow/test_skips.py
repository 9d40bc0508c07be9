"""Code that a condition may leave out."""

from __future__ import annotations

import ast
from typing import Any

from engine.flow.branches import Branch
from engine.flow.skips import SkipWatch, bodies_of_loops, other_side_of


def test_loops_around_jumps() -> None:
    """The innermost one counts, and no function inside."""
    tree = ast.parse(
        "for a in x:\n    for b in a:\n        if b: break\n    if a: continue\n"
        "    def f():\n        for c in b: break\n"
    )
    bodies = bodies_of_loops(tree)
    assert {ast.unparse(jump): ast.unparse(body[0]).splitlines()[0] for jump, body in bodies.items()} == {
        "break": "if b:",
        "continue": "for b in a:",
    }


def test_which_conditions_have_another_side() -> None:
    """Those without an else, whose body goes on behind it."""

    def offsets(*nodes: Any) -> frozenset[int]:
        return frozenset({10, 12})

    texts = ("if a: b = c", "if a: b = c\nelse: d = c", "if a: return b", "while a: b = c")
    sides = [other_side_of(ast.parse(text).body[0], offsets) for text in texts]
    assert [side is not None for side in sides] == [True, False, False, False]
    assert sides[0] is not None and sides[0]["offsets"] == {-11} and sides[0]["entered"] == {10, 12}


def test_the_jump_is_noted_where_the_body_did_not_run() -> None:
    """On the way out of the statement, in each round."""
    branch = Branch([ast.Pass()], None, frozenset({-11}), span=(2, 3), entered=frozenset({10}))
    ran: set[int] = set()
    watch = SkipWatch([branch], ran)
    for offset, before, line in ((4, 1, 2), (10, 2, 3), (20, 3, 4), (4, 4, 2)):
        watch.step(offset, before, line)
        assert watch and not ran
    watch.step(4, 4, 2)
    watch.interrupt(2)
    watch.step(20, 2, 4)
    assert watch and not ran
    watch.step(20, 2, 4)
    assert not watch and ran == {-11}
