"""Modules and functions that code which did not run would put in a variable that code which ran calls.

In ``act = self.other if len(x) > 40 else self.act``, what ``act`` reads and returns keeps all channels, as another
call may run another module there. The same holds for lists of modules or functions that such code extends or
replaces, and for modules on which it registers a hook.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from engine.flow.branches import RESULT
from engine.flow.called_variables import HeldCall, held_calls, is_called, items_in
from engine.flow.choices import Choices
from engine.flow.forward_arguments import functions_that_choose
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import is_own_op, use_values_around_code, values_around
from engine.program.graph import Node, Value
from engine.program.places import shown_place
from engine.source.bindings import bindings
from engine.source.syntax import nodes_of, parents_of, span_of
from engine.unrecorded.chosen_numbers import assume_other_numbers
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["assume_other_choices"]

_CHANGES = frozenset("clear pop popleft remove reverse sort".split())
_HOOKS = frozenset({"register_forward_hook", "register_forward_pre_hook"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def assume_other_choices(
    branches: Sequence[UntakenBranch], runs: RecordedRuns, dataflow: Dataflow, assumptions: Assumptions
) -> None:
    """Assume nothing about numbers, modules and functions that code which did not run would choose differently.

    Args:
        branches: code that did not run, and may run for other inputs.
        runs: the recordings.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    assume_other_numbers(branches, runs, dataflow, assumptions)
    _Replacements(runs, dataflow, assumptions).assume(branches)


class _Replacements:
    """The modules and functions that branches substitute for others.

    Args:
        runs, dataflow, assumptions: as above.
    """

    def __init__(self, runs: RecordedRuns, dataflow: Dataflow, assumptions: Assumptions) -> None:
        self._runs, self._dataflow, self._assumptions = runs, dataflow, assumptions
        self._names = {id(module): name for name, module in runs.modules.items()}
        self._places: dict[CodeType, str] = {}

    def assume(self, branches: Iterable[UntakenBranch]) -> None:
        """Count as used what passes through calls of variables to which branches assign something else."""
        variables: dict[CodeType, set[str]] = {}
        expressions: set[ast.AST] = set()
        for branch in branches:
            self._use_hooked(branch)
            names = set(self._replaced(branch))
            part = branch.branch.nodes[0]
            is_choice = isinstance(part, ast.expr) and self._may_be_called(part, branch, set())
            if is_choice:
                expressions.add(part)
            if names or is_choice:
                variables.setdefault(branch.code, set()).update(names)
                self._places.setdefault(branch.code, branch.place)
        if not variables:
            return
        model = self._runs.modules[""]
        functions = functions_that_choose(model, variables.__contains__)
        choices = Choices(functions, expressions=frozenset(expressions), variables=variables)
        for call in held_calls(model, choices):
            if self._ran(call):
                self._use_values_of(call)
        for code in variables.keys() - choices.codes:  # an inner function, or one of an object
            self._use_around(code, self._places[code])

    # ------------------------------------------------------------------ what branches assign

    def _replaced(self, branch: UntakenBranch) -> Iterator[str]:
        """Yield the variables to which a branch assigns another module or function, or a list of these."""
        own = branch.branch
        changed = set(own.assigned) | {name for node in own.syntax for name in _changed_in_place(node)}
        for name in changed - {branch.self_name}:
            if is_called(branch.tree, name) or self._is_called_elsewhere(name, branch):
                yield name
        if own.returns and any(self._may_be_called(value, branch, set()) for value in own.values_of(RESULT)):
            yield RESULT

    def _is_called_elsewhere(self, name: str, branch: UntakenBranch) -> bool:
        if branch.values_of(name, {}) or _is_only_compared(name, branch.tree):
            return False
        values = [*branch.branch.values_of(name), *(b.value for b in bindings(branch.tree).get(name, ()))]
        return any(self._may_be_called(value, branch, {name}) for value in values)

    def _may_be_called(self, value: ast.expr, branch: UntakenBranch, through: set[str]) -> bool:
        """Whether an expression is a module, a function, or a list of these; ``through``: variables that led to it."""
        match value:
            case ast.Lambda():
                return True
            case ast.Name(id=name):
                return self._variable_may_be_called(name, branch, through)
            case ast.Attribute(value=of, attr=name):
                held, owner = branch.attribute(value), branch.attribute(of)
                if held is None and owner is not None:  # of an object that the module holds: a configuration
                    held = inspect.getattr_static(owner, name, None)
                return _is_called_object(self._global(value, branch) if held is None else held)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *default]):
                attribute = ast.Attribute(owner, name, ast.Load())
                return any(self._may_be_called(choice, branch, through) for choice in (attribute, *default))
            case ast.Call(func=ast.Name(id="getattr")):
                return True
            case ast.Call(func=function):
                kind = self._global(function, branch)
                if isinstance(kind, type) and issubclass(kind, nn.Module):
                    return True
        return any(self._may_be_called(item, branch, through) for item in items_in(value))

    def _variable_may_be_called(self, name: str, branch: UntakenBranch, through: set[str]) -> bool:
        if name in (branch.self_name, *through):
            return False
        through.add(name)
        if branch.modules_held(name) or any(node.name == name for node in nodes_of(branch.tree, *_DEFINITIONS)[1:]):
            return True
        bound = bindings(branch.tree).get(name, ())
        if name in (*branch.code.co_varnames, *branch.code.co_cellvars):
            return any(self._may_be_called(binding.value, branch, through) for binding in bound)
        return _is_called_object(self._global(ast.Name(name), branch))

    def _global(self, node: ast.expr, branch: UntakenBranch) -> Any:
        """Return a global, or an attribute of a Python module."""
        if isinstance(node, ast.Attribute):
            owner = self._global(node.value, branch)
            return inspect.getattr_static(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        coverage = self._runs.coverage.functions.get((branch.code, branch.owner))
        local = isinstance(node, ast.Name) and node.id in branch.code.co_varnames
        return None if coverage is None or local else coverage.space.get(getattr(node, "id", ""))

    # ------------------------------------------------------------------ what goes through the calls

    def _ran(self, call: HeldCall) -> bool:
        owner = None if call.owner is None else self._names.get(id(call.owner))
        own = [c for (code, name), c in self._runs.coverage.functions.items() if code is call.code]
        own = [c for c in own if owner is None or c.owner == owner]
        return any(c.function.ran(call.node, c.ran) for c in own) or (
            not own and call.code in self._runs.coverage.called
        )

    def _use_values_of(self, call: HeldCall) -> None:
        span = span_of(call.node)
        ops = [n for n in self._dataflow.nodes if n.site is not None and n.site.code is call.code]
        ops = [node for node in ops if node.site.span == span]
        place = self._places.get(call.code) or next(iter(self._places.values()))
        modules = [self._names[id(module)] for module in call.modules if id(module) in self._names]
        ran = [name for name in modules if self._dataflow.nodes_in(name)]
        values = [value for name in ran for value in _values_of_module(name, self._runs.modules, self._dataflow)]
        values += [v for node in ops for v in self._values_of_op(node, ran)]
        self._use(values, place)
        if (not call.is_complete or not (ops or ran)) and (ops or ran or _may_hold_values(call)):
            self._use_around(call.code, place, call.owner)

    def _values_of_op(self, node: Node, covered: Collection[str]) -> Iterator[Value]:
        """Yield the inputs and outputs of an op in a call, or of the whole layer if it has parts."""
        if not {node.module, *node.callers}.isdisjoint(covered):
            return
        if is_own_op(self._runs.modules, node) or not list(self._runs.modules[node.module].children()):
            yield from (value for value in (*node.inputs, *node.outputs) if not value.stored)
        else:
            for values in self._dataflow.boundary(node.module):
                yield from values

    def _use_hooked(self, branch: UntakenBranch) -> None:
        """Count as used the values around modules on which a branch registers a hook."""
        for call in (node for node in branch.branch.syntax if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in _HOOKS:
                held = branch.attribute(call.func.value)
                name = branch.module_name(held)
                if name is None:
                    self._use_around(branch.code, branch.place)
                else:
                    self._use(_values_of_module(name, self._runs.modules, self._dataflow), branch.place)

    def _use(self, values: Iterable[Value], place: str) -> None:
        reason = f"may go through another layer or function, which the code at {shown_place(place)} chooses"
        self._assumptions.use(values, reason, place)

    def _use_around(self, code: CodeType, place: str, owner: nn.Module | None = None) -> None:
        name = None if owner is None else self._names.get(id(owner))
        if name is not None:
            self._use(values_around(name, self._runs.modules, self._dataflow), place)
            return
        reason = f"may go through another layer or function, which the code at {shown_place(place)} chooses"
        use_values_around_code(code, self._runs.modules, self._dataflow, self._assumptions, reason)
        self._assumptions.keeping.add(place)


def _is_only_compared(name: str, tree: ast.AST) -> bool:
    """Whether a function does no more with a variable than to compare it, or to write it into a text.

    Example:
        >>> tree = ast.parse("def f(a, b):\\n  if a == 1 and b is None: print(f'{a}')\\n  return b")
        >>> _is_only_compared("a", tree), _is_only_compared("b", tree)
        (True, False)
    """
    parents = parents_of(tree)
    loads = (node for node in nodes_of(tree, ast.Name) if node.id == name and isinstance(node.ctx, ast.Load))
    return all(isinstance(parents[load], (ast.Compare, ast.FormattedValue)) for load in loads)


def _may_hold_values(call: HeldCall) -> bool:
    """Whether a call receives values, or may be that of an inner function, which reads enclosing variables."""
    inner = any(isinstance(constant, CodeType) for constant in call.code.co_consts)
    return bool(call.node.args or call.node.keywords) or inner


def _values_of_module(name: str, modules: Mapping[str, nn.Module], dataflow: Dataflow) -> Iterator[Value]:
    """Yield the inputs and outputs of a module; of a layer without parts all values, as it may run repeatedly."""
    if list(modules[name].children()):
        for values in dataflow.boundary(name):
            yield from values
    else:
        nodes = dataflow.nodes_in(name)
        yield from (value for node in nodes for value in (*node.inputs, *node.outputs) if not value.stored)


def _changed_in_place(node: ast.AST) -> Iterator[str]:
    """Yield the variable that a statement or a call leaves with another function, or with a changed list."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _CHANGES:
            yield name
        case ast.Delete(targets=targets):
            parts = (target for target in targets if isinstance(target, ast.Subscript))
            yield from (part.value.id for part in parts if isinstance(part.value, ast.Name))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name


def _is_called_object(held: Any) -> bool:
    if isinstance(held, (list, tuple)):
        return any(map(_is_called_object, held))
    if isinstance(held, dict):
        return any(map(_is_called_object, held.values()))
    return isinstance(held, nn.Module) or (callable(held) and not isinstance(held, type))
