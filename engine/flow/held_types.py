"""Whether variables in a condition may hold another type in another call of the model.

An op fails on anything but a tensor. As long as no earlier condition leads elsewhere, a variable that held results of
ops whenever a condition was evaluated holds such results in every call.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.flow.branches import Branch
from engine.flow.conditions import TYPE_CHECKS
from engine.flow.control_flow import may_leave
from engine.flow.coverage import FunctionCoverage
from engine.limits import MOST_VALUES
from engine.source.bindings import bindings
from engine.source.syntax import TRIES, nodes_of

__all__ = ["HeldTypes", "branches_without_other", "may_continue_after_error"]


_CONTAINERS = (list, tuple, dict, str)


class HeldTypes:
    """The types that the variables in the condition of a branch have held.

    Args:
        branch: a branch that did not run.
        coverage: the coverage of its function.
        self_name: the argument that is the module itself, or None.
    """

    def __init__(self, branch: Branch, coverage: FunctionCoverage, self_name: str | None) -> None:
        self._branch, self._coverage = branch, coverage
        self._tree, self._bindings = coverage.function.tree, bindings(coverage.function.tree, self_name)

    def are_computed(self, variable: ast.Name) -> bool:
        """Whether a variable held only results of ops, alone or in a container, whenever the condition read it.

        Args:
            variable: a variable in the condition, or in the values of its variables. An argument that the function
                never assigns is the same everywhere.
        """
        if variable in _inside(self._branch.test) and self._are_computed_at(self._branch, variable.id):
            return True
        if variable.id in self._bindings or variable.id not in _arguments(self._tree):
            return False
        return any(self._are_computed_at(branch, variable.id) for branch in self._always_decided())

    def _always_decided(self) -> Iterator[Branch]:
        """Yield the branches that did not run although every call of the function evaluates their conditions."""
        tests = _always_evaluated(self._tree)
        yield from (b for b in self._coverage.function.untaken(self._coverage.ran) if b.test in tests)

    def _are_computed_at(self, branch: Branch, variable: str) -> bool:
        held = self._coverage.seen.get(branch, {}).get(variable, ())
        computed = (kind == "values" and all(v.producer is not None for v in values) for kind, values in held)
        return 0 < len(held) < MOST_VALUES and variable in branch.relevant_names and all(computed)

    def others(self) -> set[str]:
        """Return the variables in the condition, and in the values of these, that may have another type."""
        return {node.id for node in self._behind if isinstance(node, ast.Name) and not self.are_computed(node)}

    def checked(self) -> set[str]:
        """Return those of `others` whose type the condition checks (``torch.is_tensor(x)``)."""
        calls = (n for n in self._behind if isinstance(n, ast.Call) and _checks_type(n))
        names = (n for call in calls for argument in call.args for n in ast.walk(argument) if isinstance(n, ast.Name))
        return {n.id for n in names if not self.are_computed(n)}

    @functools.cached_property
    def _behind(self) -> list[ast.AST]:
        """The syntax of the condition, and of the values of its variables that may have another type."""
        new = [] if self._branch.test is None else list(_types_read(self._branch.test))
        nodes, names = list(new), set[str]()
        while new:
            more = {n.id for n in new if isinstance(n, ast.Name) and not self.are_computed(n)} - names
            names |= more
            new = [n for name in more for b in self._bindings.get(name, ()) for n in _types_read(b.value)]
            nodes += new
        return nodes


# What follows from the syntax alone is asked again for each module of a class.


@functools.cache
def _inside(test: ast.AST | None) -> frozenset[ast.AST]:
    return frozenset(ast.walk(test) if isinstance(test, ast.expr) else ())


@functools.cache
def _arguments(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    return frozenset(n.arg for n in ast.walk(tree.args) if isinstance(n, ast.arg))


@functools.cache
def _always_evaluated(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[ast.AST]:
    """Return the conditions that every call of a function evaluates."""
    body = tree.body
    end = next((place + 1 for place, statement in enumerate(body) if may_leave(statement)), len(body))
    return frozenset(statement.test for statement in body[:end] if isinstance(statement, ast.If))


@functools.cache
def _types_read(node: ast.AST) -> Sequence[ast.AST]:
    """Return the syntax inside, without variables of which only an attribute of tensors is read (``x.shape``)."""
    of_tensors = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_of_tensors(node.attr)
    children = () if of_tensors else ast.iter_child_nodes(node)
    return node, *(inner for child in children for inner in _types_read(child))


def _is_of_tensors(attribute: str) -> bool:
    return hasattr(Tensor, attribute) and not any(hasattr(kind, attribute) for kind in _CONTAINERS)


def _checks_type(call: ast.Call) -> bool:
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return function in TYPE_CHECKS or function.startswith("is")


def branches_without_other(coverage: FunctionCoverage) -> list[Branch]:
    """Return an empty branch for each condition that can only skip code that ran.

    Args:
        coverage: of a function.
    """
    tree, ran = coverage.function.tree, coverage.ran
    taken = [n for n in nodes_of(tree, ast.If) if coverage.function.ran(n.body[0], ran)]
    cases = (n.subject for n in nodes_of(tree, ast.Match) if coverage.function.ran(n.subject, ran))
    noted = {branch.test for branch in coverage.function.branches if branch.entered}
    tests = (*(n.test for n in taken if not n.orelse and n.test not in noted), *cases)
    return [Branch([test], test, frozenset()) for test in tests]


def may_continue_after_error(coverage: FunctionCoverage) -> bool:
    """Whether a function catches an error of code that ran, and does not raise another one.

    Args:
        coverage: of the function.
    """
    nodes = nodes_of(coverage.function.tree, *TRIES, ast.With, ast.AsyncWith)
    ran = [n for n in nodes if coverage.function.ran(n.body[0], coverage.ran)]
    caught = (handler for n in ran if isinstance(n, TRIES) for handler in n.handlers)
    contexts = (item.context_expr for n in ran if not isinstance(n, TRIES) for item in n.items)
    names = {getattr(n, "attr", getattr(n, "id", "")) for context in contexts for n in ast.walk(context)}
    return "suppress" in names or any(not isinstance(handler.body[-1], ast.Raise) for handler in caught)
