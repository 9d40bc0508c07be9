"""What code that did not run combines variables with, entry by entry: both need the same channels."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.flow.effects import names_read, operands
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.program.graph import Value
from engine.source.bindings import bindings, bound_value
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
        shapes = _Shapes(branch, stored).of(operand)
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


class _Shapes:
    """Shapes of what a branch combines entry by entry, as far as its code and the recordings tell.

    Args:
        branch: the branch.
        stored: values of the parameters and buffers that were read, by name.
    """

    def __init__(self, branch: UntakenBranch, stored: Mapping[str, Value]) -> None:
        self._branch, self._stored = branch, stored
        self._left_out = {name for name in branch.arguments() - {branch.self_name} if self._is_left_out(name)}

    def of(self, expr: ast.expr) -> list[Sequence[int]] | None:
        """Return the shapes of the tensors in an expression, none for numbers; None if any is unknown."""
        if self._left_out.issuperset(names_read(expr)):  # nothing but sizes, types and numbers in the code, or those
            return []
        if isinstance(expr, ast.Name):
            return self._of_variable(expr.id)
        if isinstance(expr, ast.Attribute):
            held = self._held(expr)
            return [held.shape] if isinstance(held, Tensor) else [] if isinstance(held, _PLAIN) else None
        if isinstance(expr, ast.Call):
            return self._of_call(expr)
        return self._of_all(ast.iter_child_nodes(expr)) if isinstance(expr, _OPERATORS) else None

    def _of_all(self, parts: Iterable[ast.AST]) -> list[Sequence[int]] | None:
        shapes = [self.of(part) for part in parts if isinstance(part, ast.expr)]
        return None if None in shapes else [shape for own in shapes for shape in own or ()]

    def _of_variable(self, name: str) -> list[Sequence[int]] | None:
        """Return the shapes of the tensors in a variable, and of those that code which did not run computes it from."""
        branch, own = self._branch, self._branch.branch.values_of(name)
        is_unknown = not own if name in branch.branch.assigned else name not in branch.code.co_varnames
        idle = [*own, *self._set_by_idle_code(name)]
        if is_unknown or branch.holds_unread(name, self._stored) or any(name in names_read(value) for value in idle):
            return None
        others, recorded = self._of_all(idle), branch.values_of(name, self._stored)
        return None if others is None else [*(value.shape for value in recorded), *others]

    def _set_by_idle_code(self, name: str) -> list[ast.expr]:
        """Return what code that did not run, here or elsewhere in the function, assigns to a variable."""
        own = bindings(self._branch.tree, self._branch.self_name).get(name, ())
        return [bound_value(name, binding) for binding in own if not self._branch.ran(binding.node)]

    def _of_call(self, call: ast.Call) -> list[Sequence[int]] | None:
        parts, function, functions = [*call.args, *(k.value for k in call.keywords)], call.func, self._branch.functions
        if isinstance(function, ast.Name):
            return [] if function.id in _OF_NUMBERS else self._of_all(parts) if function.id in _OF_PARTS else None
        if not isinstance(function, ast.Attribute):
            return None
        if function.attr in functions.reducing and not parts:
            return [] if self._is_tensor(function.value) else None
        is_entrywise = functions.of_call(function.attr) is not None and not functions.moves(call)
        if not (is_entrywise or function.attr in functions.broadcasting):
            return None
        if self._is_torch(function.value):
            return self._of_all(parts)
        return self._of_all([function.value, *parts]) if self._is_tensor(function.value) else None

    def _is_tensor(self, expr: ast.expr) -> bool:
        """Whether an expression is certainly a tensor, whose methods are torch's."""
        if isinstance(expr, ast.Name):
            return bool(self._branch.values_of(expr.id, self._stored))
        if isinstance(expr, ast.Attribute):
            return isinstance(self._held(expr), Tensor)
        if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
            return self._is_torch(expr.func.value) or self._is_tensor(expr.func.value)
        return isinstance(expr, ast.BinOp) and any(map(self._is_tensor, (expr.left, expr.right)))

    def _is_torch(self, expr: ast.expr) -> bool:
        return next(names_read(expr), None) in self._branch.functions.namespaces

    def _held(self, expr: ast.expr) -> Any:
        """Return what an attribute holds, also one of a plain object in an attribute of the module."""
        if not isinstance(expr, ast.Attribute):
            return self._branch.attribute(expr)
        owner = self._held(expr.value)
        if isinstance(owner, nn.Module):
            return getattr(owner, expr.attr, _Unknown)
        return getattr(owner, "__dict__", {}).get(expr.attr, _Unknown)

    def _is_left_out(self, name: str) -> bool:
        """Whether an argument is no tensor in the recordings, and keeps what the caller passes."""
        is_tensor = self._branch.values_of(name, self._stored) or self._branch.holds_unread(name, self._stored)
        return not is_tensor and name not in self._branch.branch.assigned and not self._set_by_idle_code(name)


class _Unknown:
    """Stands for what an attribute holds that was not read."""


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_OPERATORS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.UnaryOp)
_OF_NUMBERS = frozenset(function.__name__ for function in (bool, float, int, len))
_OF_PARTS = frozenset(function.__name__ for function in (abs, max, min, round, sum))
