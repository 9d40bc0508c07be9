"""A branch that no recording took: which variables and modules its code reads, calls, returns and assigns."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from engine.flow.branches import RESULT, Branch
from engine.flow.conditions import Conditions
from engine.flow.control_flow import tests_in
from engine.flow.coverage import FunctionCoverage
from engine.flow.effects import Effect, Functions, effect_on, effects, names_read, names_read_only_by, nodes_read
from engine.flow.held_types import HeldTypes
from engine.flow.names_used import attributes_used, globals_used
from engine.numbers.sized_places import is_at
from engine.observations.dataflow import Dataflow
from engine.observations.indexed_reads import IndexedReads
from engine.program.graph import Value
from engine.source.bindings import bindings, set_from_globals
from engine.source.instructions import arguments_of
from engine.source.model_code import methods_of
from engine.source.syntax import TRIES, is_literal_size, nodes_of
from engine.unrecorded.mentioned_modules import modules_in
from engine.unrecorded.skipped_code import effects_of_skipping, is_in_loop

__all__ = ["UntakenBranch"]

_MISSING = object()
_RECORDED = ("values", "inside")  # values of a variable inside containers, or inside other objects
_CONTAINERS = (ast.Tuple, ast.List, ast.Dict)


class UntakenBranch:
    """A branch of a function that did not run for one module.

    Args:
        branch: the branch.
        coverage: of the function, for that module.
        modules: all modules by name.
        names: names of the modules by identity.
        dataflow: of the recorded ops.

    Attributes:
        code: of the function.
        owner: name of the module.
        place: file and line of the branch.
        self_name: the argument that is the module itself; None in a plain function.
        types: of what the variables in its condition hold.
        tree: syntax of the function.
        space: its globals.
        has_run: whether it ran, in other rounds of a loop or in other calls.
        seen: what each of its variables held, once per observation: a kind, and the values.
        functions: of torch, under the names that the function has for them.
    """

    def __init__(
        self,
        branch: Branch,
        coverage: FunctionCoverage,
        modules: Mapping[str, nn.Module],
        names: Mapping[int, str],
        dataflow: Dataflow,
    ) -> None:
        self.branch, self._coverage, self._dataflow = branch, coverage, dataflow
        self._modules, self._names = modules, names
        self.code, self.tree, self.space = coverage.function.code, coverage.function.tree, coverage.space
        self.place = f"{self.code.co_filename}:{branch.line}"
        self.owner, self.self_name = coverage.owner, self.code.co_varnames[0] if coverage.is_method else None
        self.has_run, self.seen = not coverage.ran.isdisjoint(branch.offsets), coverage.seen.get(branch, {})
        self.types = HeldTypes(branch, coverage, self.self_name)
        self.functions = dataflow.functions.within(coverage.space, self.code)

    def is_decided_at(self, places: Collection[str]) -> bool:
        """Whether its condition is on one of the given lines."""
        return any(is_at(test, self.code.co_filename, places) for test in self.tests())

    def tests(self) -> list[ast.expr]:
        """Return the conditions that decide whether it runs."""
        return tests_in(self.branch.test)

    def is_fixed(
        self,
        free: Collection[str],
        never_changed: Callable[[str], bool],
        never_reassigned: Callable[[str], bool] | None = None,
        sized: Collection[str] = (),
        may_run: Callable[[ast.AST], bool] = lambda node: False,
        computed: Callable[[ast.Name], bool] = lambda variable: False,
        declared: Callable[[str], bool] = lambda path: False,
    ) -> bool:
        """Whether its condition has the same value in every call.

        Args:
            free: arguments that may have other values in other calls.
            never_changed, never_reassigned, sized, computed, declared: as those of `Conditions`.
            may_run: whether syntax that did not run may run in other calls.
        """
        function = self._coverage.function

        def ran(node: ast.AST) -> bool:
            return function.evaluated(node, self._coverage.ran) or may_run(node)

        conditions = Conditions(
            function.tree, self._coverage.space, free, never_changed, ran, self.self_name, never_reassigned,
            self.code.co_filename, sized, computed, declared,
        )  # fmt: skip
        test = self.branch.test
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            own = replace(conditions, ran=lambda node: True)  # the recordings may have stopped at an operand before
            if any(self._is_false(part) and own.is_fixed(part) for part in test.values):
                return True
        return test is not None and conditions.is_fixed(test)

    def _is_false(self, test: ast.expr) -> bool:
        """Whether a condition is an attribute of the module or a part of it, other than its mode, that is false now."""
        held = self.attribute(test) if isinstance(test, ast.Attribute) and test.attr != "training" else None
        return isinstance(held, (bool, int, str)) and not held

    @property
    def is_interrupted(self) -> bool:
        """Whether an error kept it from running to its end, other than one that always occurs."""
        return self.branch.is_interrupted and not self._lacks_attribute(self.branch.nodes[:1], lambda name: True)

    def arguments(self) -> set[str]:
        """Return the names of the function's arguments."""
        return set(arguments_of(self.code))

    def enclosing_variables(self) -> set[str]:
        """Return the names of the variables of the enclosing function, which may hold anything."""
        return set(self.code.co_freevars) - {"__class__"}

    def would_fail(self, never_changed: Callable[[str], bool]) -> bool:
        """Whether it uses an attribute of the module that stays None or missing, or a name that nothing defines.

        Args:
            never_changed: whether no code sets an attribute of the module later.
        """
        if self._lacks_attribute(self.branch.nodes, never_changed):
            return True
        if nodes_of(self.tree, *TRIES):  # what it computes before the error may be used
            return False
        names = globals_used(tuple(self.branch.nodes), self.code)
        return any(name not in self._coverage.space and not hasattr(builtins, name) for name in names)

    def _lacks_attribute(self, nodes: Sequence[ast.AST], never_changed: Callable[[str], bool]) -> bool:
        """Whether code uses an attribute of the module that is and stays None or missing."""
        owner, name = self._modules[self.owner], self.self_name
        there = {match[1] for key in self.seen if (match := re.match(rf"{name}\.(\w+)", key))}  # while the call runs
        used = set(attributes_used(tuple(nodes), name)) - there if name else set()
        held = {n: getattr(owner, n, _MISSING) for n in used}
        return any(value is _MISSING or value is None and never_changed(n) for n, value in held.items())

    def effects(self) -> Mapping[str, Effect]:
        """Return its effect on the contents of each variable."""
        variables = set(self.code.co_varnames) - set_from_globals(self.tree, self.code)
        foreign = [
            name
            for name, held in self.seen.items()
            if name in variables and not {kind for kind, _ in held} & {*_RECORDED, "module", "stored"}
        ]
        return _effects(self.branch, self.functions, frozenset(foreign), self.returned_argument())

    def effects_of_skipping(self) -> Mapping[str, Effect]:
        """Return the effect of skipping what it skips on each variable, without those that it only fills in if None."""
        all_effects = effects_of_skipping(self.branch, self.tree, self.functions)
        return {n: effect for n, effect in all_effects.items() if ("none", None) not in self.seen.get(n, ())}

    def ran(self, node: ast.AST) -> bool:
        """Whether a syntax node of the function ran."""
        return self._coverage.function.ran(node, self._coverage.ran)

    def returned_argument(self) -> str | None:
        """Return the argument, never assigned to, that the function returned wherever it did return; None if none."""
        returns = (n for n in nodes_of(self.tree, ast.Return) if n not in self.branch.syntax)
        values = [n.value for n in returns if self.ran(n)]
        names = {value.id if isinstance(value, ast.Name) else None for value in values}
        name = names.pop() if len(names) == 1 else None
        return name if name in self.arguments() and name not in bindings(self.tree, self.self_name) else None

    def reshaped_to_literals(self, beside_attributes: bool) -> set[str]:
        """Return the variables that are reshaped to sizes written in the code, which do not follow.

        Args:
            beside_attributes: whether to include calls whose other sizes are all attributes that ops receive where code
                ran.
        """
        result: set[str] = set()
        for call in self._calls_with_literal_sizes(beside_attributes):
            inside = (node for inner in self._module_calls_in(call) for node in ast.walk(inner))
            result |= set(names_read(call)) - names_read_only_by(ast.walk(call), inside)
        return result

    def modules_reshaped_to_literals(self, beside_attributes: bool) -> set[str]:
        """Return the modules whose results are reshaped to such sizes (``self.qkv(x).reshape(b, 3, -1)``)."""
        sized = self._calls_with_literal_sizes(beside_attributes)
        calls = (inner for call in sized for inner in self._module_calls_in(call))
        return {name for call in calls if (name := self.module_name(self.attribute(call.func))) is not None}

    def _calls_with_literal_sizes(self, beside_attributes: bool) -> Iterator[ast.Call]:
        for call in self._calls():
            if getattr(call.func, "attr", "") in self._dataflow.functions.sizing:
                own = {(self.owner, n.attr) for arg in call.args for n in ast.walk(arg) if isinstance(n, ast.Attribute)}
                follow = set() < own <= self._dataflow.attributes
                if any(is_literal_size(arg) for arg in call.args) and (beside_attributes or not follow):
                    yield call

    def _module_calls_in(self, call: ast.Call) -> Iterator[ast.Call]:
        """Yield the calls of modules that computed something for others where they ran."""
        for node in ast.walk(call):
            name = self.module_name(self.attribute(node.func)) if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Call) and name is not None and self._dataflow.boundary(name)[1]:
                yield node

    def passed_through(self) -> set[str]:
        """Return the variables that it returns, appends to a list, or assigns to other variables unchanged."""
        results = [n.value for n in self.branch.syntax if isinstance(n, (ast.Return, ast.Assign)) and n.value]
        if isinstance(self.branch.nodes[0], ast.expr):
            results.append(self.branch.nodes[0])
        parts = [p for r in results for p in (ast.iter_child_nodes(r) if isinstance(r, _CONTAINERS) else [r])]
        appended = (a for call in self._calls() if getattr(call.func, "attr", "") == "append" for a in call.args)
        return {n.id for n in (*parts, *appended) if isinstance(n, ast.Name)}

    def replaced(self, selecting: bool) -> set[str]:
        """Return the variables, `RESULT` included, to which it assigns something other than their usual value.

        Args:
            selecting: whether entries selected along dimensions other than the channels count as the usual value.
        """
        selected = self.indexed_beside_channels() if selecting else set()
        names = set(self.branch.assigned) | ({RESULT} if self.branch.returns else set())
        effects, replaces = self.effects().items(), self.branch.replaces
        recomputed = {name for name, effect in effects if effect is not Effect.USES and not replaces(name)}
        return {name for name in names - recomputed if not self._follows_from_replaced(name, selected)}

    def _follows_from_replaced(self, name: str, selected: Collection[str]) -> bool:
        """Whether the value that it assigns to a variable is computed elementwise from the variable's usual value."""
        values = {value.index for value in self._recorded_values(name)}
        others = () if is_in_loop(self.branch.nodes, self.tree) else self.branch.names
        same = {n for n in (*others, name) if not values.isdisjoint(v.index for v in self._recorded_values(n))}
        return not values or all(
            any(effect_on(expr, variable, self.functions) is not None for variable in same)
            or self._reads_state(expr)
            or same & set(selected) >= {n for n in names_read(expr) if self._recorded_values(n)} > set()
            for expr in self.branch.values_of(name)
        )

    def _reads_state(self, expr: ast.expr) -> bool:
        """Whether an expression looks something up in an object of the caller's: ``cache.layers[0].keys``.

        Another call has left it there. What the module itself holds, or this call has computed, does not count.
        """
        root = expr
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        computed = any(self._recorded_values(name) for name in names_read(expr))
        return root is not expr and isinstance(root, ast.Name) and root.id != self.self_name and not computed

    def indexed_beside_channels(self) -> set[str]:
        """Return the variables that it only indexes, along dimensions other than the channels."""
        reads = IndexedReads(self.branch.syntax, self.tests(), self._recorded_values, self._dataflow)
        return reads.beside_channels()

    def passed_on(self) -> set[str]:
        """Return the variables that it passes only to modules that ran, or to hooks."""
        passed: list[ast.expr] = []
        for call in self._calls():
            arguments = [
                a.value if isinstance(a, ast.Starred) else a for a in (*call.args, *(k.value for k in call.keywords))
            ]
            if any(map(self.is_module, (call.func, *arguments))):
                passed += arguments
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("register_hook", "retain_grad"):
                passed.append(call.func.value)
        return names_read_only_by(self.branch.syntax, passed)

    def _calls(self) -> Iterator[ast.Call]:
        return (node for node in self.branch.syntax if isinstance(node, ast.Call))

    def values_read(self, stored: Mapping[str, Value]) -> dict[str, list[Value]]:
        """Return the recorded values that it may read, by variable; those of other state under its text and a space.

        Args:
            stored: values of the parameters and buffers that were read, by name.
        """
        names = self.branch.names | {name for name in self.seen if name.endswith(" ")}
        result = {name: self.values_of(name, stored) for name in names}
        for node in (inner for outer in self.branch.nodes for inner in nodes_read(outer)):
            held = self.attribute(node) if isinstance(node, ast.Attribute) else None
            name = self.weight_name(held) if isinstance(held, Tensor) else None
            if name is not None and name in stored:
                result[f"{name} "] = [stored[name]]
        return {name: values for name, values in result.items() if values}

    def values_of(self, variable: str, stored: Mapping[str, Value]) -> list[Value]:
        """Return the recorded values that a variable may hold.

        Args:
            variable: its name.
            stored: as for `values_read`.
        """
        names = (name for kind, name in self.seen.get(variable, ()) if kind == "stored")
        return self._recorded_values(variable) + [stored[name] for name in names if name in stored]

    def holds_unread(self, variable: str, stored: Mapping[str, Value]) -> bool:
        """Whether a variable held a tensor that no op read, which has no value in the program."""
        return any(k == "unread" or (k == "stored" and n not in stored) for k, n in self.seen.get(variable, ()))

    def _recorded_values(self, variable: str) -> list[Value]:
        values = [v for kind, held in self.seen.get(variable, ()) if kind in _RECORDED for v in held]
        return list(filter(self._dataflow.contains, values))

    def weight_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter in the model, or of a buffer with several dimensions, which may be masked."""
        is_weight = isinstance(tensor, nn.Parameter) or (tensor.is_floating_point() and tensor.ndim > 1)
        stored = ((n, key, t) for n, m in self._modules.items() for key, t in {**m._parameters, **m._buffers}.items())
        return next((f"{n}.{key}".lstrip(".") for n, key, t in stored if t is tensor), None) if is_weight else None

    def module_calls(self) -> Iterator[tuple[str, set[str]]]:
        """Yield the modules that it calls, with the variables that it passes to them."""
        for call in self._calls():
            variables = {n for a in (*call.args, *(k.value for k in call.keywords)) for n in names_read(a)}
            modules = self.modules_held(call.func.id) if isinstance(call.func, ast.Name) else []
            module = self.module_name(self.attribute(call.func))
            yield from ((name, variables) for name in (*modules, *([] if module is None else [module])))

    def consumer(self) -> str | None:
        """Return the module that is called with its result."""
        user = self.branch.user
        return self.module_name(self.attribute(user.func)) if isinstance(user, ast.Call) else None

    def mentioned_modules(self) -> set[str]:
        """Return the names of the modules that it mentions, directly or in a method that it calls."""
        result: set[str] = set()
        for node in self.branch.syntax:
            if isinstance(node, ast.Name):
                result |= set(self.modules_held(node.id))
            elif isinstance(node, ast.Attribute):
                held = self.attribute(node)
                module = self.module_name(held)
                if module is not None:
                    result.add(module)
                elif isinstance(held, (list, tuple, dict)):
                    result |= {name for part in modules_in(held) if (name := self.module_name(part)) is not None}
                elif isinstance(node.value, ast.Name) and node.value.id == self.self_name and inspect.ismethod(held):
                    result |= self.modules_in_method(node.attr)
        return result - {self.owner, ""}

    def modules_replaced(self) -> set[str]:
        """Return the modules that run instead of those that it picks: ``layer = self.a if fast else self.b``."""
        held = {module for name in self.branch.assigned for module in self.modules_held(name)}
        statement = () if self.branch.statement is None else ast.walk(self.branch.statement)
        beside = (self.module_name(self.attribute(n)) for n in statement if isinstance(n, ast.Attribute))
        return (held | {name for name in beside if name is not None}) - {self.owner, ""}

    def modules_in_method(self, method: str) -> set[str]:
        """Return the modules that a method of the module mentions, directly or in a method that it calls."""
        owner = self._modules[self.owner]
        attributes_by_method = dict(methods_of(type(owner)))  # type: ignore[arg-type]
        mentioned, waiting = set[str](), [method]
        while waiting:
            attributes = attributes_by_method.pop(waiting.pop(), frozenset())
            waiting += attributes & attributes_by_method.keys()
            mentioned |= attributes
        return {self._names[id(m)] for n, m in owner._modules.items() if n in mentioned and id(m) in self._names}

    def modules_held(self, variable: str) -> list[str]:
        """Return the names of the modules that a variable may hold."""
        return [name for kind, name in self.seen.get(variable, ()) if kind == "module"]

    def module_name(self, held: Any) -> str | None:
        """Return the name of a module; None for anything else."""
        return self._names.get(id(held)) if isinstance(held, nn.Module) else None

    def is_module(self, node: ast.expr) -> bool:
        """Whether an expression is a module: a part of this one, or what a variable or a list holds."""
        if isinstance(node, ast.Subscript):
            return self.is_module(node.value)
        if isinstance(node, ast.Name):
            kinds = {kind for kind, _ in self.seen.get(node.id, ())}
            return node.id != self.self_name and "module" in kinds and kinds <= {"module", "none"}
        return isinstance(self.attribute(node), nn.Module)

    def attribute(self, node: ast.expr) -> Any:
        """Return what an attribute of the module, or of a part of it, holds."""
        if isinstance(node, ast.Attribute) and isinstance(owner := self.attribute(node.value), nn.Module):
            return getattr(owner, node.attr, None)
        return self._modules[self.owner] if isinstance(node, ast.Name) and node.id == self.self_name else None


@functools.cache
def _effects(branch: Branch, functions: Functions, foreign: frozenset[str], own: str | None) -> Mapping[str, Effect]:
    return effects(branch.nodes, functions, foreign, own)
