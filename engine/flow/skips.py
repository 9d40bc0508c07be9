"""Code that a condition may skip: the body of an ``if`` without an ``else``, and the rest of a loop's body."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from engine.flow.control_flow import NESTED, may_leave

__all__ = ["SkipWatch", "bodies_of_loops", "other_operand", "other_side_of"]

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def bodies_of_loops(tree: ast.AST) -> Mapping[ast.AST, Sequence[ast.stmt]]:
    """Return the body of the innermost loop around each ``continue`` and ``break`` in a function.

    Args:
        tree: of the function.

    Example:
        >>> [loop] = ast.parse("for n in x:\\n    if n: continue\\n    y = n").body
        >>> [[ast.unparse(s) for s in body][-1] for body in bodies_of_loops(loop).values()]
        ['y = n']
    """
    table: dict[ast.AST, Sequence[ast.stmt]] = {}
    waiting: list[tuple[ast.AST, Sequence[ast.stmt]]] = [(tree, ())]
    while waiting:
        node, body = waiting.pop()
        if isinstance(node, (ast.Continue, ast.Break)):
            table[node] = body
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, NESTED):
                inside = isinstance(node, _LOOPS) and child in node.body
                waiting.append((child, node.body if inside else body))  # type: ignore[attr-defined]
    return table


def other_side_of(statement: ast.AST, offsets: Callable[..., frozenset[int]]) -> dict[str, Any] | None:
    """Return the attributes of the branch for the missing ``else`` of an ``if``; None for other statements.

    It has no instructions: a negative offset stands for the jump over the other side.

    Args:
        statement: any syntax node.
        offsets: returns the offsets of the instructions of some nodes.
    """
    if not isinstance(statement, ast.If) or statement.orelse or any(map(may_leave, statement.body)):
        return None
    entered = offsets(*statement.body)
    if not entered:
        return None
    nothing = ast.copy_location(ast.Pass(), statement.test)
    return {
        "nodes": [nothing],
        "test": statement.test,
        "offsets": frozenset({-1 - min(entered)}),
        "span": (statement.lineno, statement.end_lineno or statement.lineno),
        "skipped": statement.body,
        "entered": entered,
    }


class _Side(Protocol):
    """The side of a condition that has no code."""

    @property
    def offsets(self) -> frozenset[int]: ...

    @property
    def entered(self) -> frozenset[int]: ...

    @property
    def span(self) -> tuple[int, int]: ...


class SkipWatch:
    """Notes which conditions without an ``else`` are false in a running function.

    Args:
        branches: that did not run yet.
        ran: offsets of the instructions that ran; is extended.
    """

    def __init__(self, branches: Iterable[_Side], ran: set[int]) -> None:
        self._waiting = {branch: False for branch in branches if branch.entered}
        self._ran = ran

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def interrupt(self, line: int) -> None:
        """Note an error: code that it skips was not skipped because a condition is false.

        Args:
            line: where the error occurred.
        """
        for branch in self._waiting:
            first, last = branch.span
            self._waiting[branch] |= first <= line <= last

    def step(self, offset: int, before: int, line: int) -> None:
        """Note an instruction.

        Args:
            offset: of the instruction.
            before: the line that ran before.
            line: its line; 0 where the function returns.
        """
        for branch, has_entered in list(self._waiting.items()):
            first, last = branch.span
            was_inside, is_inside = first <= before <= last, first <= line <= last
            if is_inside and offset in branch.entered:
                self._waiting[branch] = True
            elif was_inside and not is_inside:
                if has_entered:
                    self._waiting[branch] = False
                else:
                    self._ran |= branch.offsets
                    del self._waiting[branch]


def other_operand(whole: ast.AST | None, part: ast.AST, statement: ast.stmt | None) -> ast.expr | None:
    """Return the other side of a conditional expression, unless its value is assigned or returned.

    Args:
        whole: the expression that contains ``part``; None if it is a statement of a block.
        part: one side.
        statement: that they are in, if it assigns or returns.

    Example:
        >>> tree = ast.parse("y = (h if t else g) + 1\\nz = h if t else g").body
        >>> wholes = [tree[0].value.left, tree[1].value]
        >>> [other_operand(w, w.body, s) is w.orelse for w, s in zip(wholes, tree, strict=True)]
        [True, False]
    """
    if not isinstance(whole, ast.IfExp) or part is whole.test:
        return None
    expression = whole
    if getattr(statement, "value", None) is whole:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if not any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
            return None
    return expression.orelse if part is expression.body else expression.body
