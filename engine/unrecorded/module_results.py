"""Results of modules that ran, as code that did not run would use them: ``return self.encoder(other)``.

A module that is called by code that did not run computes as many channels as elsewhere. That is fine if its result goes
where it also goes elsewhere: to the same module, to the same variable, or into the function's result. Anywhere else,
all of its channels count.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from engine.flow.branches import RESULT, Branch
from engine.flow.effects import Effect
from engine.observations.dataflow import Dataflow
from engine.program.graph import Value
from engine.source.syntax import parents_of
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["results_used_otherwise"]

_PARTS = frozenset({"_modules", "children", "modules", "named_children", "named_modules"})
"""Attributes and methods of a module through which code iterates over its parts."""


def results_used_otherwise(
    branch: UntakenBranch, modules: Mapping[str, nn.Module], dataflow: Dataflow
) -> Iterator[Value]:
    """Yield the results of modules that a branch calls and uses differently than code that ran.

    Args:
        branch: a branch that no recording took.
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
    """The calls of modules in a branch, and the uses of their results.

    Args:
        branch, modules, dataflow: as above.
    """

    def __init__(self, branch: UntakenBranch, modules: Mapping[str, nn.Module], dataflow: Dataflow) -> None:
        self._branch, self._modules, self._dataflow = branch, modules, dataflow

    def modules(self, call: ast.Call) -> set[str]:
        """Return the modules that a call may run: itself, as an item, by a method, or as an argument of a function."""
        names = self._called(call.func)
        if not names:
            names = {name for argument in _arguments(call) for name in self._named(argument)}
        return names - {"", self._branch.owner}

    def _called(self, function: ast.expr) -> set[str]:
        names = set(self._named(function))
        if names or not isinstance(function, ast.Attribute):
            return names
        if self._is_owner(function.value):
            return self._branch.modules_in_method(function.attr)
        return set(self._named(function.value))

    def _is_owner(self, expr: ast.expr) -> bool:
        """Whether an expression is the module to which the code belongs: ``self``, or ``super()``."""
        if isinstance(expr, ast.Call):
            return isinstance(expr.func, ast.Name) and expr.func.id == "super"
        return isinstance(expr, ast.Name) and expr.id == self._branch.self_name

    def _named(self, expr: ast.expr, through: Collection[str] = ()) -> list[str]:
        """Return the modules that an expression stands for; ``through``: the variables that led to it."""
        if isinstance(expr, ast.Subscript):
            return self._members(expr.value, through)
        if isinstance(expr, ast.Call):
            return self._looked_up(expr, through)
        if isinstance(expr, ast.Attribute) and expr.attr in _PARTS:
            return [part for owner in self._owners(expr.value, through) for part in self._parts(owner)]
        if isinstance(expr, ast.Name):
            is_new = expr.id not in (self._branch.self_name, *through)
            picked = self._picked(expr.id, {*through, expr.id}) if is_new else []
            return [*self._branch.modules_held(expr.id), *picked] if expr.id != self._branch.self_name else []
        name = self._branch.module_name(self._branch.attribute(expr)) if isinstance(expr, ast.Attribute) else None
        return [] if name is None else [name]

    def _owners(self, expr: ast.expr, through: Collection[str]) -> list[str]:
        return [self._branch.owner] if self._is_owner(expr) else self._named(expr, through)

    def _members(self, container: ast.expr, through: Collection[str]) -> list[str]:
        """Return the modules among the items of a container: of a list of modules, or of ``self.children()``."""
        names = self._named(container, through)
        if any(isinstance(node, ast.Attribute) and node.attr in _PARTS for node in ast.walk(container)):
            return names
        return [item for name in names for item in self._items(name)]

    def _looked_up(self, call: ast.Call, through: Collection[str]) -> list[str]:
        """Return what ``getattr(self, name)`` and other functions may return: any part, unless the name is a text."""
        match call:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, *rest]):
                pass
            case ast.Call(func=ast.Attribute(value=owner, attr="get_submodule"), args=[*rest]):
                pass
            case ast.Call(func=ast.Attribute(attr=attribute)) if attribute in _PARTS:
                return self._named(call.func, through)
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in vars(builtins):  # list(…), next(iter(…))
                return [part for argument in arguments for part in self._named(argument, through)]
            case _:
                return []
        first = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
        parts = [part for outer in self._owners(owner, through) for part in self._parts(outer)]
        return [part for part in parts if first is None or part.rpartition(".")[2] == str(first).partition(".")[0]]

    def _picked(self, variable: str, through: Collection[str]) -> list[str]:
        """Return the modules that a variable of the branch iterates over, or is set to."""
        names: list[str] = []
        for node in self._branch.branch.syntax:
            if isinstance(node, (ast.For, ast.comprehension)) and _is_named(node.target, variable):
                for inner in (n for n in ast.walk(node.iter) if isinstance(n, ast.Attribute)):
                    names += self._members(inner, through) or self._named(inner, through)
            elif isinstance(node, ast.Assign) and any(_is_named(target, variable) for target in node.targets):
                if isinstance(node.value, (ast.Attribute, ast.Subscript)):
                    names += self._named(node.value, through)
        return names

    def _items(self, module: str) -> list[str]:
        is_container = isinstance(self._modules[module], (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        return self._parts(module) if is_container else []

    def _parts(self, module: str) -> list[str]:
        return [f"{module}.{key}".lstrip(".") for key in self._modules[module]._modules]

    def asks_for_more(self, call: ast.Call, goes_on: bool) -> bool:
        """Whether a module may return inner values in a call: one of its methods runs, or it receives an option.

        Args:
            call: of the module.
            goes_on: whether the result is used as elsewhere, which shows that an option changes nothing.
        """
        function = call.func
        if isinstance(function, ast.Attribute) and not self._named(function) and self._named(function.value):
            return True
        options = (argument for argument in _arguments(call) if isinstance(argument, ast.Constant))
        return not goes_on and any(option.value not in (None, False) for option in options)

    def inputs_of_user(self, result: ast.AST) -> Iterator[Value]:
        """Yield the values that modules read elsewhere which receive a result in the branch."""
        user = _users(self._branch.branch).get(result)
        for module in self.modules(user) if isinstance(user, ast.Call) else ():
            yield from self._dataflow.boundary(module)[0]

    def goes_on_as_elsewhere(self, result: ast.AST, outputs: frozenset[int], through: Collection[str] = ()) -> bool:
        """Whether code uses a result as it is used elsewhere.

        Args:
            result: a call, or a variable that holds its result.
            outputs: values that the module computed where it ran.
            through: the variables that have held it.
        """
        user = _users(self._branch.branch).get(result)
        as_it_is = result is self._branch.branch.nodes[0]  # one side of a conditional expression
        if isinstance(user, ast.Expr):
            return True
        if isinstance(user, ast.Return):
            return self._held(RESULT, outputs)
        if isinstance(user, (ast.Assign, ast.AnnAssign)) and (as_it_is or user.value is result):
            return all(
                isinstance(target, ast.Name) and self._is_read_as_elsewhere(target.id, outputs, through)
                for target in (user.targets if isinstance(user, ast.Assign) else [user.target])
            )
        if isinstance(user, ast.Call) and (as_it_is or result in _arguments(user)):
            read = {value.index for name in self.modules(user) for value in self._dataflow.boundary(name)[0]}
            return not read.isdisjoint(outputs)
        return False

    def _is_read_as_elsewhere(self, variable: str, outputs: frozenset[int], through: Collection[str]) -> bool:
        """Whether a variable holds the results elsewhere, or goes where they go and is not read after the branch."""
        if variable in through:
            return True
        if self._held(variable, outputs):
            effect = self._branch.effects().get(variable, Effect.KEEPS)
            return effect not in (Effect.MOVES, Effect.USES) or variable in self._branch.passed_on()
        names = [n for n in self._branch.branch.syntax if isinstance(n, ast.Name) and n.id == variable]
        loads = [n for n in names if isinstance(n.ctx, ast.Load)]
        is_own = not self._branch.values_of(variable, {})
        return is_own and all(self.goes_on_as_elsewhere(n, outputs, {*through, variable}) for n in loads)

    def _held(self, variable: str, outputs: frozenset[int]) -> bool:
        return any(value.index in outputs for value in self._branch.values_of(variable, {}))


def _is_named(target: ast.AST, variable: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == variable for node in ast.walk(target))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


@functools.cache
def _users(branch: Branch) -> Mapping[ast.AST, ast.AST]:
    """Return the parent of each syntax node of a branch; the parent of a keyword argument's value is the call."""
    users = dict(parents_of(*branch.nodes))
    for call in (node for node in branch.syntax if isinstance(node, ast.Call)):
        users.update((keyword.value, call) for keyword in call.keywords)
    if branch.user is not None:
        users[branch.nodes[0]] = branch.user
    return users
