"""The other side of a conditional expression whose value no variable holds.

In ``self.head((h if short else g).mean(1))`` the reader receives either value: if one side did not run, both have to
keep all channels. If a variable holds the value, the branch assigns to it, which other analyses follow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import Tensor

from engine.bounds import is_number
from engine.flow.effects import names_read
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import values_around
from engine.program.graph import Value
from engine.source.syntax import compares_with_none, nodes_of
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["parameters_instead", "values_instead"]

_NUMERIC = frozenset(function.__name__ for function in (abs, bool, float, int, len, max, min, round, sum))


def values_instead(branch: UntakenBranch, runs: RecordedRuns, dataflow: Dataflow) -> Iterator[Value]:
    """Yield the values on the other side of an expression.

    Args:
        branch: the side that did not run.
        runs: the recordings.
        dataflow: of the recorded ops.
    """
    other = branch.branch.other_side
    if other is None or branch.consumer() is not None:
        return
    yield from parameters_instead(branch, runs)
    if _stands_in(branch):
        return
    if not isinstance(other, ast.Call):
        yield from (value for name in names_read(other) for value in branch.values_of(name, runs.stored))
    results = [*_results_of_ops(branch, other, dataflow), *_results_of_modules(branch, other, dataflow)]
    yield from results
    if isinstance(other, ast.Call) and not (results or _is_numeric(branch, other, runs)):  # the model's own function
        yield from values_around(branch.owner, runs.modules, dataflow)


def parameters_instead(branch: UntakenBranch, runs: RecordedRuns) -> Iterator[Value]:
    """Yield the parameters on the other side, which another call may replace.

    Args:
        branch, runs: as for `values_instead`.
    """
    other = branch.branch.other_side
    held = (branch.attribute(node) for node in nodes_of(other, ast.Attribute)) if other is not None else ()
    names = (branch.weight_name(value) for value in held if isinstance(value, Tensor))
    yield from (runs.stored[name] for name in names if name is not None and name in runs.stored)


def _stands_in(branch: UntakenBranch) -> bool:
    """Whether a side is an argument, and the other one its replacement if it is None, which other analyses follow."""
    own, test = branch.branch.nodes[0], branch.branch.test
    is_compared = isinstance(test, ast.Compare) and compares_with_none(test) and isinstance(test.left, ast.Name)
    return is_compared and isinstance(own, ast.Name) and own.id == test.left.id  # type: ignore[union-attr]


def _is_numeric(branch: UntakenBranch, expr: ast.expr, runs: RecordedRuns) -> bool:
    """Whether a side is computed by Python's own functions and operators from what holds no tensors."""
    match expr:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return not (branch.values_of(name, runs.stored) or branch.holds_unread(name, runs.stored))
        case ast.Attribute():
            return is_number(branch.attribute(expr))
        case ast.Call(func=ast.Name(id=name)) if name not in _NUMERIC:
            return False
        case ast.Call(func=ast.Name(), keywords=[]) | ast.Tuple() | ast.List() | ast.BinOp() | ast.UnaryOp():
            parts = expr.args if isinstance(expr, ast.Call) else ast.iter_child_nodes(expr)
            return all(_is_numeric(branch, part, runs) for part in parts if isinstance(part, ast.expr))
    return False


def _results_of_ops(branch: UntakenBranch, expr: ast.expr, dataflow: Dataflow) -> Iterator[Value]:
    start, end = (expr.lineno, expr.col_offset), (expr.end_lineno or 0, expr.end_col_offset or 0)
    for node in dataflow.nodes:
        if node.site is not None and node.site.code is branch.code and start < (node.site.end or start) <= end:
            yield from node.outputs


def _results_of_modules(branch: UntakenBranch, expr: ast.expr, dataflow: Dataflow) -> Iterator[Value]:
    for call in nodes_of(expr, ast.Call):
        held = branch.modules_held(call.func.id) if isinstance(call.func, ast.Name) else []
        for module in (*held, branch.module_name(branch.attribute(call.func))):
            yield from () if module is None else dataflow.boundary(module)[1]
