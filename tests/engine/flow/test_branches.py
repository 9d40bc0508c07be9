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


def gather(flag: bool, items: list[int]) -> list[int]:
    """A function whose branch has a comprehension, which is code of its own."""
    if flag:
        return [item + 1 for item in items if item != 3]
    return [item - 1 for item in items]


def test_comprehensions_run_with_their_branch() -> None:
    """What is inside of a comprehension did not run if the branch around it did not."""
    function = branches_of(gather.__code__)
    assert function is not None
    [branch, *_] = function.branches
    ran = set(range(0, len(gather.__code__.co_code), 2))
    inside = {ast.unparse(node): node for node in ast.walk(function.tree) if isinstance(node, (ast.BinOp, ast.Compare))}
    assert branch.offsets and all(function.ran(node, ran) for node in inside.values())
    idle = {text for text, node in inside.items() if not function.ran(node, ran - branch.offsets)}
    assert idle == {"item + 1", "item != 3"}


def test_functions_without_branches() -> None:
    """There is nothing to watch."""
    assert branches_of((lambda x: x + 1).__code__) is None
