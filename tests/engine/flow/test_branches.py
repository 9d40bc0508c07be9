"""Which parts of a function did not run."""

from __future__ import annotations

import ast

from engine.flow.branches import branches_of


def choose(flag: bool, x: int) -> int:
    """A function with branches, in one line and in several."""
    y = x + 1 if flag else x - 1
    if flag:
        y = y * 2
    else:
        return y
    return y + 3


def test_what_did_not_run() -> None:
    """The largest parts that no instruction ran of, expressions included."""
    function = branches_of(choose.__code__)
    assert function is not None
    ran = set(range(0, len(choose.__code__.co_code), 2))
    assert not list(function.untaken(ran))
    branches = list(function.untaken(set()))
    assert [ast.unparse(branch.nodes[0]) for branch in branches] == [
        "x + 1",
        "x - 1",
        "y = y * 2",
        "return y",
        "return y + 3",
    ]
    assert [sorted(branch.names) for branch in branches] == [["x"], ["x"], ["y"], ["y"], ["y"]]


def test_functions_without_branches() -> None:
    """There is nothing to watch."""
    assert branches_of((lambda x: x + 1).__code__) is None
