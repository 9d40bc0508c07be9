"""Parameters and layers that code which did not run reaches by look-ups, through variables, or in other functions.

``self.get_parameter("m.weight").exp()`` and ``for part in self.modules()`` read parameters that the code does not name
as attributes, and a method that the code calls names them elsewhere. A look-up without a literal may return all
parameters and parts of the module.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

from engine.flow.effects import nodes_read
from engine.limits import MOST_FUNCTIONS
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.program.graph import Value
from engine.source.decorated import unwrapped
from engine.source.function_text import syntax_of
from engine.source.lookups import (
    LOOKS_UP_PARTS,
    LOOKS_UP_TENSORS,
    literal_name,
    reads_metadata_alone,
    result_of_lookup,
)
from engine.source.sites import is_library
from engine.source.syntax import nodes_of, parents_of
from engine.unrecorded.mentioned_modules import modules_in
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["values_looked_up"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_GIVES_ITEMS = frozenset("get items pop values".split())


def values_looked_up(
    branch: UntakenBranch, runs: RecordedRuns, files: Collection[str], dataflow: Dataflow
) -> list[Value]:
    """Return the parameters and buffers that a branch may reach, and the values around layers that it looks up.

    Args:
        branch: a branch that no recording took.
        runs: the recordings.
        files: that define the model's classes; plain functions of other files are not followed.
        dataflow: of the recorded ops.
    """
    if branch.has_run:
        return []
    search = _Search(runs.modules, files)
    space = runs.coverage.functions[branch.code, branch.owner].space
    arguments = {} if branch.self_name is None else {branch.self_name: frozenset({branch.owner})}
    search.read(_Code(branch.branch.nodes, branch.tree, arguments, space, branch.modules_held))
    stored = [runs.stored[name] for name in sorted(search.tensors) if name in runs.stored]
    around = (values for part in sorted(search.parts - {branch.owner}) for values in dataflow.boundary(part))
    return stored + [value for values in around for value in values]


@dataclass(eq=False)
class _Code:
    """A branch, or the body of a function that it calls.

    Attributes:
        nodes: statements, or an expression.
        tree: of the function.
        arguments: names of the modules that its arguments hold.
        space: its globals.
        held: returns the modules that a variable held where the recordings decided on the branch.
    """

    nodes: Sequence[ast.AST]
    tree: ast.AST
    arguments: Mapping[str, frozenset[str]]
    space: Mapping[str, Any]
    held: Callable[[str], Iterable[str]] | None = None
    within: set[str] = field(default_factory=set)


class _Search:
    """The parameters, buffers and parts that code may reach, by their names in the model.

    Args:
        modules: all modules by name.
        files: as for `values_looked_up`.

    Attributes:
        tensors, parts: what was reached.
    """

    def __init__(self, modules: Mapping[str, nn.Module], files: Collection[str]) -> None:
        self._modules, self._files = modules, files
        self._names = {id(module): name for name, module in reversed(list(modules.items()))}
        self._followed, self._returned = set[tuple[Any, ...]](), dict[tuple[Any, ...], set[str]]()
        self.tensors, self.parts = set[str](), set[str]()

    def read(self, code: _Code) -> None:
        """Find what some code reads, and follow the functions that it calls."""
        for node in (inner for outer in code.nodes for inner in nodes_read(outer)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                for owner in self._modules_of(node.value, code):
                    self._read_attribute(node, owner, code)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self._read_call(node, node.func.id, code)
            elif isinstance(node, ast.Name) and node.id not in code.within:
                code.within.add(node.id)
                for function in _functions_within(code.tree, node.id):  # which the code may call
                    inside = function.body if isinstance(function.body, list) else [function.body]
                    self.read(_Code(inside, code.tree, code.arguments, code.space, code.held, code.within))

    # ------------------------------------------------------------------ what code reads

    def _read_attribute(self, node: ast.Attribute, name: str, code: _Code) -> None:
        owner = self._modules[name]
        if node.attr in LOOKS_UP_TENSORS | LOOKS_UP_PARTS:
            self._look_up(result_of_lookup(node, code.tree), node.attr, name, code)
        elif node.attr in owner._parameters or node.attr in owner._buffers:
            if not reads_metadata_alone(node, code.tree):
                self.tensors.add(f"{name}.{node.attr}".lstrip("."))
        elif node.attr not in owner._modules:
            call = parents_of(code.tree).get(node)
            for function in self._methods(node, owner):
                passed = call if isinstance(call, ast.Call) and call.func is node else None
                self._follow(function, passed, code, frozenset({name}))

    def _read_call(self, call: ast.Call, function: str, code: _Code) -> None:
        if function in ("getattr", "vars") and call.args:
            if literal_name(call, code.tree) is None:
                for name in self._modules_of(call.args[0], code):
                    self._look_up(call, function, name, code)
            else:
                self._read_literal(call, code)
        held = code.space.get(function)
        if isinstance(held, FunctionType) and held.__code__.co_filename in self._files:
            self._follow(held, call, code)

    def _read_literal(self, call: ast.Call, code: _Code) -> None:
        """Read an attribute that ``getattr`` names by a literal."""
        attribute = literal_name(call, code.tree)
        for name in self._modules_of(call.args[0], code):
            owner = self._modules[name]
            if attribute in owner._parameters or attribute in owner._buffers:
                self.tensors.add(f"{name}.{attribute}".lstrip("."))

    def _look_up(self, lookup: ast.AST, kind: str, name: str, code: _Code) -> None:
        is_branch = code.held is not None  # of which other analyses follow the calls
        gives_parts = kind in LOOKS_UP_PARTS
        if reads_metadata_alone(lookup, code.tree, calls=is_branch and gives_parts):
            return
        literal = literal_name(lookup, code.tree)
        owner, prefix = self._modules[name], f"{name}." if name else ""
        names = {literal} if literal is not None and kind != "getattr" else self._names_listed(lookup, code)
        if names is not None:
            reached = {prefix + attribute for attribute in names}
            self.tensors |= reached
            reached = {part for part in reached if part in self._modules}
        else:
            reached = {name}
        for part in reached:
            self._reach(part, of_parts=gives_parts)
        if names is None and not gives_parts:
            self.tensors |= {prefix + key for key in (*owner._parameters, *owner._buffers)}

    def _names_listed(self, lookup: ast.AST, code: _Code) -> set[str] | None:
        """Return the names in the attribute that ``getattr(self, key) for key in self.keys`` iterates over."""
        match lookup:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Name(id=key), *_]):
                loops = [n for n in nodes_of(code.tree, ast.For, ast.comprehension) if _is_named(n.target, key)]
            case _:
                return None
        names: set[str] = set()
        for loop in loops:
            path: Any = loop.iter
            match path, loop.target:
                case ast.Call(func=ast.Attribute(value=table, attr="items")), ast.Tuple(elts=[ast.Name(id=first), _]):
                    path = table if first == key else None
                case ast.Call(func=ast.Attribute(value=table, attr="keys")), ast.Name():
                    path = table
            owners = self._modules_of(path.value, code) if isinstance(path, ast.Attribute) else set()
            lists = [vars(self._modules[owner]).get(getattr(path, "attr", "")) for owner in owners]
            if not lists or not all(map(_is_list_of_names, lists)):
                return None
            names |= {name for held in lists for name in held or ()}
        return names if loops else None

    def _reach(self, name: str, of_parts: bool) -> None:
        """Count all parameters and buffers in a module, and all layers in it if code may take these."""
        for inner in self._modules[name].modules():
            own = self._names.get(id(inner))
            if own is not None:
                self.tensors |= {f"{own}.{key}".lstrip(".") for key in (*inner._parameters, *inner._buffers)}
                self.parts |= {own} - {""} if of_parts else set()

    # ------------------------------------------------------------------ functions

    def _methods(self, node: ast.Attribute, owner: nn.Module) -> Iterator[FunctionType]:
        """Yield the functions of a module's class behind an attribute; behind ``super()``, those of all bases."""
        if node.attr == "forward" or hasattr(nn.Module, node.attr):
            return
        members = [vars(base)[node.attr] for base in type(owner).__mro__ if node.attr in vars(base)]
        for member in members if isinstance(node.value, ast.Call) else members[:1]:
            inner = member.fget if isinstance(member, property) else getattr(member, "func", member)
            function = unwrapped(getattr(inner, "__func__", inner))
            if isinstance(function, FunctionType) and not is_library(function.__code__.co_filename):
                yield function

    def _follow(
        self, function: FunctionType, call: ast.Call | None, code: _Code, owner: frozenset[str] | None = None
    ) -> None:
        """Read the body of a function with the modules that a call passes to it."""
        tree = syntax_of(function.__code__)
        if tree is None:
            return
        body = _Code(tree.body, tree, self._passed(function, call, code, owner), function.__globals__)
        key = function.__code__, *sorted((name, *sorted(held)) for name, held in body.arguments.items())
        if body.arguments and key not in self._followed and len(self._followed) < MOST_FUNCTIONS:
            self._followed.add(key)
            self.read(body)

    def _passed(
        self, function: FunctionType, call: ast.Call | None, code: _Code | None, owner: frozenset[str] | None
    ) -> dict[str, frozenset[str]]:
        names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
        passed: dict[str, frozenset[str]] = {}
        if owner is not None and names:
            passed, names = {names[0]: owner}, names[1:]
        if call is not None and code is not None:
            pairs = [*zip(names, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)]
            passed |= {name: frozenset(self._modules_of(value, code)) for name, value in pairs}
        return {name: held for name, held in passed.items() if held}

    # ------------------------------------------------------------------ modules

    def _modules_of(self, node: ast.AST, code: _Code, through: Collection[str] = ()) -> set[str]:
        """Return the modules that an expression may be or contain; ``through``: the variables that led to it."""
        match node:
            case ast.Name(id=name):
                return self._held(name, code, through)
            case ast.Attribute(value=value, attr=attribute):
                if attribute in LOOKS_UP_PARTS:
                    return self._parts_in(self._modules_of(value, code, through))
                return {p for m in self._modules_of(value, code, through) for p in self._part(m, attribute)}
            case ast.Subscript(value=value):
                return self._items(self._modules_of(value, code, through), getattr(node.slice, "value", None))
            case ast.Call():
                return self._results(node, code, through)
            case ast.IfExp(body=body, orelse=orelse):
                return self._modules_of(body, code, through) | self._modules_of(orelse, code, through)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.BoolOp(values=items):
                return {name for item in items for name in self._modules_of(item, code, through)}
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value) | ast.Starred(value=value):
                return self._modules_of(value, code, through)
            case ast.NamedExpr(value=value):
                return self._modules_of(value, code, through)
        return set()

    def _held(self, variable: str, code: _Code, through: Collection[str]) -> set[str]:
        if variable in through:
            return set()
        if variable in code.arguments:
            return set(code.arguments[variable])
        held = set() if code.held is None else set(code.held(variable))
        further = {*through, variable}
        for node in nodes_of(code.tree, ast.For, ast.comprehension):
            if _is_named(node.target, variable):
                held |= self._items(self._modules_of(node.iter, code, further))
        for node in nodes_of(code.tree, ast.Assign, ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is_named(target, variable) for target in targets):
                held |= self._modules_of(node.value, code, further)
        return held

    def _results(self, call: ast.Call, code: _Code, through: Collection[str]) -> set[str]:
        """Return the modules that a call may return."""
        function = call.func
        if isinstance(function, ast.Name):
            if function.id == "super":
                return set(next(iter(code.arguments.values()), frozenset()))
            if function.id == "getattr" and call.args:
                owners, attribute = self._modules_of(call.args[0], code, through), literal_name(call, code.tree)
                return {
                    part
                    for owner in owners
                    for part in (self._parts_in({owner}) if attribute is None else self._part(owner, attribute))
                }
            arguments = call.args if function.id in vars(builtins) else []
            return {name for argument in arguments for name in self._modules_of(argument, code, through)}
        if not isinstance(function, ast.Attribute):
            return set()
        owners = self._modules_of(function.value, code, through)
        if function.attr in LOOKS_UP_PARTS:
            literal = literal_name(call, code.tree)
            names = {f"{owner}.{literal}".lstrip(".") for owner in owners}
            return names & self._modules.keys() if literal is not None else self._parts_in(owners)
        if function.attr in _GIVES_ITEMS:
            return self._items(owners)
        methods = ((owner, m) for owner in owners for m in self._methods(function, self._modules[owner]))
        return {name for owner, method in methods for name in self._returned_by(method, owner)}

    def _returned_by(self, method: FunctionType, owner: str) -> set[str]:
        """Return the modules that a method may return, except those from calling itself."""
        key, tree = (method.__code__, owner), syntax_of(method.__code__)
        if key not in self._returned and tree is not None:
            self._returned[key] = set()
            body = _Code(tree.body, tree, self._passed(method, None, None, frozenset({owner})), method.__globals__)
            values = (r.value for r in nodes_of(tree, ast.Return) if r.value is not None)
            self._returned[key] = {name for value in values for name in self._modules_of(value, body)}
        return self._returned.get(key, set())

    def _part(self, name: str, attribute: str) -> set[str]:
        owner = self._modules[name]
        held = owner._modules.get(attribute, vars(owner).get(attribute))
        parts = [held] if isinstance(held, nn.Module) else modules_in(held)
        return {self._names[id(part)] for part in parts if id(part) in self._names}

    def _parts_in(self, names: Collection[str]) -> set[str]:
        inner = (part for name in names for part in self._modules[name].modules())
        return {self._names[id(part)] for part in inner if id(part) in self._names}

    def _items(self, names: Collection[str], key: Any = None) -> set[str]:
        """Return some modules, and the items of those that are lists; exactly one of these if a literal names it."""
        items = set(names)
        for name in names:
            owner = self._modules[name]
            if isinstance(owner, _LISTS):
                parts = list(owner._modules.values())
                if isinstance(key, str) and key in owner._modules:
                    parts = [owner._modules[key]]
                elif isinstance(key, int) and -len(parts) <= key < len(parts):
                    parts = [parts[key]]
                items |= {self._names[id(part)] for part in parts if id(part) in self._names}
        return items


def _functions_within(tree: ast.AST, name: str) -> Iterator[Any]:
    """Yield the inner functions and lambda functions that a variable of a function holds."""
    for node in nodes_of(tree, ast.FunctionDef, ast.Assign):
        if isinstance(node, ast.FunctionDef):
            yield from [node] if node.name == name and node is not tree else []
        elif isinstance(node.value, ast.Lambda) and any(_is_named(target, name) for target in node.targets):
            yield node.value


def _is_list_of_names(held: Any) -> bool:
    return isinstance(held, (dict, list, tuple, set)) and all(isinstance(name, str) for name in held)


def _is_named(target: ast.AST, variable: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == variable for node in ast.walk(target))
