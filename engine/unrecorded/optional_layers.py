"""Layers that only run in some rounds of a loop, at random or by a flag: ``if not dropped: h = layer(h)``.

The values of a variable before and after such layers may replace one another if they have the same channels, as along a
residual stream: a layer then reads the result of any earlier layer, or of none.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

from engine.observations.dataflow import Dataflow
from engine.program.graph import Value
from engine.unrecorded.skipped_code import are_aligned
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["values_around_optional_layers"]


def values_around_optional_layers(
    branch: UntakenBranch, dataflow: Dataflow, stored: Mapping[str, Value]
) -> list[Value]:
    """Return the values of variables before and after the layers that a branch calls, if it does nothing else.

    Args:
        branch: a branch that ran in some rounds.
        dataflow: of the recorded ops.
        stored: values of the parameters and buffers that were read, by name.

    Returns:
        Values that have the same channels; none if they do not, or if the branch does anything else.
    """
    assigned = _assigned_by_calls(branch.branch.nodes)
    calls = [node for node in branch.branch.syntax if isinstance(node, ast.Call) and not _asks_for_type(node)]
    layers = {name for name, _ in branch.module_calls()}
    if not assigned or not layers or not all(branch.is_module(call.func) for call in calls):
        return []
    if any(branch.holds_unread(name, stored) for name in assigned):
        return []
    values = {value.index: value for name in assigned for value in branch.values_of(name, stored)}
    for layer in layers:
        values.update((value.index, value) for value in _before_and_after(layer, dataflow))
    aligned = list(values.values())
    return aligned if are_aligned(aligned, dataflow) else []


def _asks_for_type(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "isinstance"


def _assigned_by_calls(statements: Sequence[ast.AST]) -> set[str]:
    """Return the variables set to results of calls, or items of these; none if there is any other statement."""
    assigned = set[str]()
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            return set()
        if not _is_result(statement.value, assigned):  # type: ignore[attr-defined]
            return set()
        assigned.add(targets[0].id)
    return assigned


def _is_result(source: ast.expr, assigned: Collection[str]) -> bool:
    """Whether an expression is a call, or an item of one, or a variable that holds such a result."""
    match source:
        case ast.IfExp(body=body, orelse=orelse):
            return _is_result(body, assigned) and _is_result(orelse, assigned)
        case ast.Subscript(value=value, slice=ast.Constant()):
            return _is_result(value, assigned)
        case ast.Name(id=name):
            return name in assigned
    return isinstance(source, ast.Call)


def _before_and_after(layer: str, dataflow: Dataflow) -> Iterator[Value]:
    """Yield the outputs of a layer, and those of its inputs that have the same channels."""
    inputs, outputs = dataflow.boundary(layer)
    yield from outputs
    for value in inputs:
        alike = (output for output in outputs if output.shape == value.shape)
        if any(dataflow.follows(output, [value], aligned=True) for output in alike):
            yield value
