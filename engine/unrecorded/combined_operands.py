"""What code that did not run combines variables with, entry by entry: both need the same channels."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from engine.flow.effects import Effect, names_read, nodes_read, operands
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.program.graph import Value
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["adds_results_alone", "keep_beside_operands"]


def adds_results_alone(branch: UntakenBranch, variable: str) -> bool:
    """Whether a branch adds nothing to a variable but the results of modules that ran elsewhere.

    Args:
        branch: the branch.
        variable: the variable, which the branch recomputes.
    """
    added = [operand for operand, adds in _operands(branch, variable) if adds]
    return bool(added) and all(_module_called(branch, operand) is not None for operand in added)


def keep_beside_operands(
    branch: UntakenBranch,
    variable: str,
    values: Sequence[Value],
    stored: Mapping[str, Value],
    dataflow: Dataflow,
    assumptions: Assumptions,
) -> None:
    """Keep the sizes of a variable that a branch combines with other tensors, along the dimensions that these have.

    What modules returned where they ran loses the same channels, or both keep all. A tensor that no recording has,
    such as an argument that the example leaves out, is taken to be broadcast.

    Args:
        branch: the branch.
        variable: the variable, which the branch recomputes.
        values: values that the variable held.
        stored: values of the parameters and buffers that were read, by name.
        dataflow: of the recorded ops.
        assumptions: the assumptions, which are extended.
    """
    for operand, _ in _operands(branch, variable):
        module = _module_called(branch, operand)
        results = [] if module is None else dataflow.boundary(module)[1]
        if results:
            assumptions.interchange([*values, *results])
            continue
        shapes = _shapes(branch, operand, stored)
        for value in values:
            assumptions.keep_along(value, range(value.ndim) if shapes is None else _dims_shared(value, shapes))


def _operands(branch: UntakenBranch, variable: str) -> Iterator[tuple[ast.expr, bool]]:
    return operands(branch.branch.nodes, variable, branch.functions, branch.returned_argument())


def _module_called(branch: UntakenBranch, expr: ast.expr) -> str | None:
    """Return the module whose result an expression is."""
    return branch.module_name(branch.attribute(expr.func)) if isinstance(expr, ast.Call) else None


def _dims_shared(value: Value, shapes: Iterable[Sequence[int]]) -> set[int]:
    """Return the dimensions of a value along which a tensor of one of some shapes is not broadcast."""
    dims = set[int]()
    for shape in shapes:
        if len(shape) > value.ndim:
            return set(range(value.ndim))
        dims.update(value.ndim - len(shape) + place for place, size in enumerate(shape) if size != 1)
    return dims


def _shapes(branch: UntakenBranch, expr: ast.expr, stored: Mapping[str, Value]) -> list[Sequence[int]] | None:
    """Return the shapes of the tensors that an expression combines entry by entry; None if they are unknown."""
    if isinstance(expr, ast.Name):
        return _shapes_of_variable(branch, expr.id, stored)
    if isinstance(expr, ast.Attribute):
        held = branch.attribute(expr)
        return [held.shape] if isinstance(held, Tensor) else [] if not _reads_tensors(branch, expr, stored) else None
    if isinstance(expr, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        parts: list[ast.expr] = [part for part in ast.iter_child_nodes(expr) if isinstance(part, ast.expr)]
    elif isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
        if expr.func.attr in branch.functions.reducing and not (expr.args or expr.keywords):
            return []
        is_entrywise = branch.functions.of_call(expr.func.attr) not in (None, Effect.USES)
        is_entrywise = is_entrywise and not branch.functions.moves(expr)
        if not (is_entrywise or expr.func.attr in branch.functions.broadcasting):
            return None if _reads_tensors(branch, expr, stored) else []
        parts = [*expr.args, *(k.value for k in expr.keywords)]
        parts += [] if _is_torch(branch, expr.func) else [expr.func.value]
    else:
        return None if _reads_tensors(branch, expr, stored) else []
    return _joined(_shapes(branch, part, stored) for part in parts)


def _shapes_of_variable(branch: UntakenBranch, name: str, stored: Mapping[str, Value]) -> list[Sequence[int]] | None:
    """Return the shapes of the tensors in a variable, or of those that the branch computes it from."""
    assigned = branch.branch.values_of(name) if name in branch.branch.assigned else []
    is_unknown = bool(assigned) is not (name in branch.branch.assigned) or branch.holds_unread(name, stored)
    if is_unknown or any(name in names_read(value) for value in assigned):
        return None
    recorded: list[Sequence[int]] = [value.shape for value in branch.values_of(name, stored)]
    return _joined([recorded, *(_shapes(branch, value, stored) for value in assigned)])


def _joined(shapes: Iterable[list[Sequence[int]] | None]) -> list[Sequence[int]] | None:
    """Return all shapes of several lists; None if any is unknown."""
    every = list(shapes)
    return None if None in every else [shape for own in every for shape in own or ()]


def _is_torch(branch: UntakenBranch, function: ast.Attribute) -> bool:
    names = list(names_read(function.value))
    return bool(names) and names[0] in branch.functions.namespaces


def _reads_tensors(branch: UntakenBranch, expr: ast.expr, stored: Mapping[str, Value]) -> bool:
    """Whether an expression reads a tensor of the recordings, what the branch sets, or the result of a module."""
    names = set(names_read(expr)) - {branch.self_name}
    if not names.isdisjoint(branch.branch.assigned) or any(branch.holds_unread(name, stored) for name in names):
        return True
    held = [branch.attribute(node) for node in nodes_read(expr) if isinstance(node, ast.Attribute)]
    is_called = any(isinstance(n, ast.Call) and _module_called(branch, n) is not None for n in nodes_read(expr))
    return is_called or any(isinstance(h, Tensor) for h in held) or any(branch.values_of(n, stored) for n in names)
