"""Items of tuples, lists and dictionaries that code picks by a number which it computes from what may be set.

A subscript is no branch, and attributes and arguments are recorded at numbers next to their own: in ``(h,
h.flip(-1))[self.epoch // 10 % 2]`` no recording may come by the second item.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from types import CodeType

from engine.recording.assumptions import Assumptions
from engine.recording.dataflow import Dataflow
from engine.recording.model_code import codes_of
from engine.recording.mutability import Mutability
from engine.recording.recorded_runs import RecordedRuns
from engine.recording.surroundings import use_values_around_code
from engine.source.bindings import bindings
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of

__all__ = ["use_values_picked_by_numbers"]

_DISPLAYS = (ast.Dict, ast.List, ast.Tuple)
_OF_FLAGS = frozenset(function.__name__ for function in (all, any, bool, int))
_STEPS = 4  # from one variable to another


def use_values_picked_by_numbers(
    runs: RecordedRuns,
    options: Callable[[CodeType], Collection[str]],
    mutability: Mutability,
    dataflow: Dataflow,
    assumptions: Assumptions,
) -> None:
    """Count as used what functions compute that pick an item by a number computed from what may be set.

    Args:
        runs: the recordings.
        options: returns the arguments of a function that other calls may pass otherwise.
        mutability: of the model's attributes.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    for code in runs.coverage.called:
        tree = syntax_of(code)
        if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for number in _picking_numbers(tree):
            if _may_be_set(number, tree, code, options(code), mutability):
                number_text = ast.unparse(number)
                reason = f"could be picked in {code.co_name} by {number_text}, which may be another number"
                use_values_around_code(code, runs.modules, dataflow, assumptions, reason)
                break


def _picking_numbers(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    """Yield the computed numbers by which a function takes items of what it put together itself.

    Example:
        >>> text = "def f(a, b, k):\\n  c = [a, b]\\n  return (a, b)[k // 2], c[k % 2], c[0], a[k + 1], {0: a}.get(-k)"
        >>> [ast.unparse(number) for number in _picking_numbers(ast.parse(text).body[0])]
        ['k // 2', 'k % 2', '-k']
    """
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=container, slice=number) if not isinstance(number, (ast.Slice, ast.Tuple)):
                pass
            case ast.Call(func=ast.Attribute(value=container, attr="get"), args=[number, *_]):
                pass
            case _:
                continue
        if _is_computed(number, tree) and _is_put_together(container, tree):
            yield number


def _is_computed(number: ast.expr, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a number is neither written down, nor what a loop counts, nor an attribute or an argument as it is.

    Flags that are only put together (``self.a and not b``, ``all([a, b])``) are recorded in all ways.
    """
    if isinstance(number, ast.Name):
        own = (b for b in bindings(tree).get(number.id, ()) if isinstance(b.node, (ast.Assign, ast.AnnAssign)))
        return any(binding.value is not None and _computes(binding.value) for binding in own)
    return _computes(number)


def _computes(expr: ast.expr) -> bool:
    signs = (n for n in nodes_of(expr, ast.UnaryOp) if isinstance(n.op, ast.USub))
    calls = (n for n in nodes_of(expr, ast.Call) if getattr(n.func, "id", "") not in _OF_FLAGS)
    is_signed = any(not isinstance(n.operand, ast.Constant) for n in signs)
    return bool(nodes_of(expr, ast.BinOp, ast.Compare)) or any(True for _ in calls) or is_signed


def _is_put_together(container: ast.expr, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if isinstance(container, ast.Name):
        return any(isinstance(binding.value, _DISPLAYS) for binding in bindings(tree).get(container.id, ()))
    return isinstance(container, _DISPLAYS)


def _may_be_set(
    number: ast.expr,
    tree: ast.FunctionDef | ast.AsyncFunctionDef,
    code: CodeType,
    options: Collection[str],
    mutability: Mutability,
) -> bool:
    """Whether a number is computed from an attribute that code sets, or from an argument that a caller may choose."""
    owners = [m for m in mutability.one_of_each_class if code in codes_of(type(m))]  # type: ignore[arg-type]
    own_name = code.co_varnames[0] if owners else None
    waiting, seen = [(number, _STEPS)], set[str]()
    while waiting:
        expr, steps = waiting.pop()
        for node in nodes_of(expr, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == own_name:
                if not all(mutability.never_changed(owner, node.attr) for owner in owners):
                    return True
        names = {node.id for node in nodes_of(expr, ast.Name)} - seen
        if not names.isdisjoint(options):
            return True
        seen |= names
        bound = (b.value for name in names - {own_name} for b in bindings(tree).get(name, ()) if b.value is not None)
        waiting += [(value, steps - 1) for value in bound] if steps else []
    return False
