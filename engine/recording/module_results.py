"""What code that did not run would do with the results of modules that ran: ``return self.encoder(other)``.

A module that is called where no recording came by computes as many channels as it does elsewhere. That is fine where
its result goes to the same module as elsewhere, or to the variable, or the result, that it stands for elsewhere as
well. In any other place all of its channels count.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from engine.program.graph import Value
from engine.recording.dataflow import Dataflow
from engine.recording.untaken import UntakenBranch
from engine.source.branches import RESULT, Branch
from engine.source.effects import Effect

__all__ = ["results_used_otherwise"]


def results_used_otherwise(
    branch: UntakenBranch, modules: Mapping[str, nn.Module], dataflow: Dataflow
) -> Iterator[Value]:
    """Yield what modules compute which a branch calls, and whose results it uses otherwise than code that ran.

    Args:
        branch: that no recording took.
        modules: all modules by name.
        dataflow: of the recorded ops.
    """
    calls = _Calls(branch, modules, dataflow)
    for node in branch.branch.syntax:
        if isinstance(node, ast.Call):
            for module in calls.modules(node):
                outputs = {value.index: value for value in dataflow.boundary(module)[1]}
                elsewhere = calls.goes_on_as_elsewhere(node, frozenset(outputs))
                if outputs and calls.asks_for_more(node, elsewhere):
                    yield from (value for inner in dataflow.nodes_in(module) for value in inner.outputs)
                elif outputs and not elsewhere:
                    yield from outputs.values()
                    yield from calls.inputs_of_user(node)


class _Calls:
    def __init__(self, branch: UntakenBranch, modules: Mapping[str, nn.Module], dataflow: Dataflow) -> None:
        self._branch, self._modules, self._dataflow = branch, modules, dataflow

    def modules(self, call: ast.Call) -> set[str]:
        """Return the modules that a call may run: itself, as an item, by a method, or as an argument of a function."""
        names = self._called(call.func)
        if not names:
            names = {name for argument in call.args for name in self._named(argument)}
        return names - {"", self._branch.owner}

    def _called(self, function: ast.expr) -> set[str]:
        names = set(self._named(function))
        if names or not isinstance(function, ast.Attribute):
            return names
        if isinstance(function.value, ast.Name) and function.value.id == self._branch.self_name:
            is_method = inspect.ismethod(self._branch.attribute(function))
            return self._branch.modules_in_method(function.attr) if is_method else set()
        return set(self._named(function.value))

    def _named(self, expr: ast.expr, through: Collection[str] = ()) -> list[str]:
        """Return the modules that an expression stands for; ``through``: the variables that led to it."""
        if isinstance(expr, ast.Subscript):
            return [name for outer in self._named(expr.value, through) for name in self._items(outer)]
        if isinstance(expr, ast.Name):
            is_new = expr.id not in (self._branch.self_name, *through)
            picked = self._picked(expr.id, {*through, expr.id}) if is_new else []
            return [*self._branch.modules_held(expr.id), *picked] if expr.id != self._branch.self_name else []
        name = self._branch.module_name(self._branch.attribute(expr)) if isinstance(expr, ast.Attribute) else None
        return [] if name is None else [name]

    def _picked(self, variable: str, through: Collection[str]) -> list[str]:
        """Return the modules that a variable of the branch goes through, or that it is set to."""
        names: list[str] = []
        for node in self._branch.branch.syntax:
            if isinstance(node, (ast.For, ast.comprehension)) and _is_named(node.target, variable):
                inner = [n for n in ast.walk(node.iter) if isinstance(n, ast.Attribute)]
                outer = [name for n in inner for name in self._named(n, through)]
                names += [item for name in outer for item in (self._items(name) or [name])]
            elif isinstance(node, ast.Assign) and any(_is_named(target, variable) for target in node.targets):
                if isinstance(node.value, (ast.Attribute, ast.Subscript)):
                    names += self._named(node.value, through)
        return names

    def _items(self, module: str) -> list[str]:
        container = self._modules[module]
        is_container = isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        return [f"{module}.{key}".lstrip(".") for key in container._modules] if is_container else []

    def asks_for_more(self, call: ast.Call, goes_on: bool) -> bool:
        """Whether a module may return inner values there: a method of it runs, or it gets an option.

        Args:
            call: of the module.
            goes_on: whether the result goes on as elsewhere, which tells that an option changes nothing.
        """
        function = call.func
        if isinstance(function, ast.Attribute) and not self._named(function) and self._named(function.value):
            return True
        options = (a for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant))
        return not goes_on and any(option.value not in (None, False) for option in options)

    def inputs_of_user(self, result: ast.AST) -> Iterator[Value]:
        """Yield what modules read elsewhere that get a result in the branch."""
        user = _users(self._branch.branch).get(result)
        for module in self.modules(user) if isinstance(user, ast.Call) else ():
            yield from self._dataflow.boundary(module)[0]

    def goes_on_as_elsewhere(self, result: ast.AST, outputs: frozenset[int], through: Collection[str] = ()) -> bool:
        """Whether code does with a result what is done with it elsewhere.

        Args:
            result: a call, or a variable that holds its result.
            outputs: what the module computed where it ran.
            through: the variables that have held it.
        """
        user = _users(self._branch.branch).get(result)
        as_it_is = result is self._branch.branch.nodes[0]  # one side of a conditional expression
        if isinstance(user, ast.Expr):
            return True
        if isinstance(user, ast.Return):
            return self._held(RESULT, outputs)
        if isinstance(user, ast.Assign) and (as_it_is or user.value is result):
            return all(
                isinstance(target, ast.Name) and self._is_read_as_elsewhere(target.id, outputs, through)
                for target in user.targets
            )
        if isinstance(user, ast.Call) and (as_it_is or result in [*user.args, *(k.value for k in user.keywords)]):
            read = {value.index for name in self.modules(user) for value in self._dataflow.boundary(name)[0]}
            return not read.isdisjoint(outputs)
        return False

    def _is_read_as_elsewhere(self, variable: str, outputs: frozenset[int], through: Collection[str]) -> bool:
        """Whether a variable holds the results elsewhere, or goes where they go and is not read behind the branch."""
        if variable in through:
            return True
        if self._held(variable, outputs):
            effect = self._branch.effects().get(variable, Effect.KEEPS)
            return effect is not Effect.USES or variable in self._branch.passed_on()
        names = [n for n in self._branch.branch.syntax if isinstance(n, ast.Name) and n.id == variable]
        loads = [n for n in names if isinstance(n.ctx, ast.Load)]
        is_own = not self._branch.values_of(variable, {})
        return is_own and all(self.goes_on_as_elsewhere(n, outputs, {*through, variable}) for n in loads)

    def _held(self, variable: str, outputs: frozenset[int]) -> bool:
        return any(value.index in outputs for value in self._branch.values_of(variable, {}))


def _is_named(target: ast.AST, variable: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == variable for node in ast.walk(target))


@functools.cache
def _users(branch: Branch) -> Mapping[ast.AST, ast.AST]:
    """Return the syntax around each node of a branch; keywords are part of their call."""
    users = {child: node for node in branch.syntax for child in ast.iter_child_nodes(node)}
    calls = {k.value: node for node in branch.syntax if isinstance(node, ast.Call) for k in node.keywords}
    if branch.user is not None:
        users.setdefault(branch.nodes[0], branch.user)
    return users | calls
