"""Conditions without consequences: ``if h.numel() > 2**31: h = h.contiguous()``.

A comparison of channels has to have the same outcome after a removal, unless both outcomes lead to the same numbers. A
copy does not change them, as long as no tensor is written to in place: such a write would not reach the copy.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable

from engine.flow.control_flow import only_reports
from engine.flow.coverage import FunctionCoverage
from engine.flow.effects import Functions
from engine.program.graph import Node
from engine.program.signature import signature
from engine.source.syntax import nodes_of

__all__ = ["places_of_idle_conditions"]


def places_of_idle_conditions(
    coverages: Iterable[FunctionCoverage], nodes: Iterable[Node], functions: Functions
) -> set[str]:
    """Return the lines of conditions whose code only copies a tensor, warns or logs, as ``file:line``.

    Args:
        coverages: of the functions that ran.
        nodes: the recorded ops.
        functions: what torch's functions do to the entries of a tensor.
    """
    copying = frozenset[str]() if any(_writes_in_place(node) for node in nodes) else functions.copying
    read = {(coverage.function.code.co_filename, coverage.function.tree) for coverage in coverages}
    return {f"{file}:{line}" for file, tree in read for line in _lines(tree, copying)}


def _writes_in_place(node: Node) -> bool:
    return node.target is None or bool(signature(node.target).writes)


def _lines(tree: ast.AST, copying: Collection[str]) -> set[int]:
    """Return the lines of such conditions in a function, except lines with other code.

    Args:
        tree: syntax of the function.
        copying: functions that copy a tensor.
    """
    lines, others = set[int](), set[int]()
    for statement in nodes_of(tree, ast.stmt):
        is_idle = isinstance(statement, ast.If) and not statement.orelse and _is_idle(statement, copying)
        first: ast.AST = statement.test if isinstance(statement, (ast.If, ast.While)) else statement
        own = range(first.lineno, (first.end_lineno or first.lineno) + 1)  # type: ignore[attr-defined]
        compound = hasattr(statement, "body") and not isinstance(statement, (ast.If, ast.While))
        (lines if is_idle else others).update(own[:1] if compound else own)
    return lines - others


def _is_idle(condition: ast.If, copying: Collection[str]) -> bool:
    named = any(isinstance(node, ast.NamedExpr) for node in ast.walk(condition.test))
    return not named and all(_copies(s, copying) or _reports(s) for s in condition.body)


def _reports(statement: ast.stmt) -> bool:
    return only_reports(statement) and not isinstance(statement, (ast.Raise, ast.Assert))


def _copies(statement: ast.stmt, copying: Collection[str]) -> bool:
    """Whether a variable is set to a copy of the tensor that it holds."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    call, target = statement.value, statement.targets[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(target, ast.Name)):
        return False
    source = call.func.value
    return call.func.attr in copying and isinstance(source, ast.Name) and source.id == target.id
