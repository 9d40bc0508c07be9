"""Which arguments of other functions follow those of forward: what a model's code passes on under another name."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from engine.source.bindings import bindings, path_of
from engine.source.branches import syntax_of

__all__ = ["passed_arguments"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_COMBINING = (
    ast.Attribute, ast.BoolOp, ast.Compare, ast.Dict, ast.IfExp, ast.List, ast.NamedExpr, ast.Starred, ast.Subscript,
    ast.Tuple, ast.UnaryOp,
)  # fmt: skip
"""Expressions that say the same as what is in them, in other words."""


def passed_arguments(model: nn.Module, arguments: Collection[str]) -> Mapping[CodeType, frozenset[str]]:
    """Return the arguments of methods and functions that are given arguments of forward, or what these decide.

    Args:
        model: its forward, and what that calls of its modules, methods and functions, is read.
        arguments: names of arguments of its forward.

    Returns:
        Names of arguments by code; forward's own are not listed.

    Example:
        >>> class Block(nn.Module):
        ...     def forward(self, x, shuffle=False):
        ...         return x.flip(1) if shuffle else x
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.block = Block()
        ...     def forward(self, x, flag=False):
        ...         return self.block(x, not flag)
        >>> passed_arguments(Net(), {"flag"})[Block.forward.__code__]
        frozenset({'shuffle'})
    """
    result: dict[CodeType, frozenset[str]] = defaultdict(frozenset)
    waiting = [(method, frozenset(arguments)) for method in _called(model)]
    seen: set[tuple[CodeType, int, frozenset[str]]] = set()
    returned: dict[tuple[CodeType, int, frozenset[str]], bool] = {}
    while waiting:
        function, names = waiting.pop()
        key = function.__code__, id(getattr(function, "__self__", None)), names
        tree = None if key in seen else syntax_of(function.__code__)
        seen.add(key)
        if tree is None:
            continue
        for callee, passed in _Reader(function, tree, names, returned).passed():
            if not passed <= result[callee.__code__]:
                result[callee.__code__] |= passed
            waiting.append((callee, result[callee.__code__]))
    return dict(result)


class _Reader:
    """Reads what one function passes on.

    Args:
        function: the function, or the method of a module.
        tree: its syntax.
        names: its arguments that whoever calls the model gives.
        returned: of which functions, with which arguments, it is known whether they return such.
    """

    def __init__(
        self,
        function: FunctionType | MethodType,
        tree: ast.FunctionDef | ast.AsyncFunctionDef,
        names: Collection[str],
        returned: dict[tuple[CodeType, int, frozenset[str]], bool],
    ) -> None:
        self._tree, self._space, self._code = tree, inspect.unwrap(function).__globals__, function.__code__
        self._returned = returned
        self._owner = function.__self__ if isinstance(function, MethodType) else None
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._first = arguments[0].arg if arguments and self._owner is not None else None
        self._bound = bindings(tree, self._first)
        self._names = set(names)
        while more := set(self._decided()) - self._names:
            self._names |= more

    def _decided(self) -> Iterator[str]:
        """Yield further variables that hold such arguments, or constants which these choose."""
        for name in self._bound.keys() - self._names:
            if any(self._follows(b.value) for b in self._bound[name]):
                yield name
        for test, names, _ in _chosen(self._tree, self._first):
            if not names <= self._names and self._follows(test):
                yield from names

    def returns(self) -> bool:
        """Whether what the function returns is such an argument, or a constant which one chooses."""
        if any(self._follows(test) for test, _, is_returned in _chosen(self._tree, self._first) if is_returned):
            return True
        return any(self._decides(value) for value in _results(self._tree))

    def _decides(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            choices = value.body, value.orelse
            return any(map(self._decides, choices)) or (self._follows(value.test) and any(map(_is_constant, choices)))
        return self._follows(value)

    def passed(self) -> Iterator[tuple[FunctionType | MethodType, frozenset[str]]]:
        """Yield the functions and methods that it calls with such arguments, with their names there."""
        for call in _calls(self._tree):
            if not any(map(self._follows, (*call.args, *(keyword.value for keyword in call.keywords)))):
                continue
            first = [a for a in call.args[:1] if not (isinstance(a, ast.Name) and a.id == self._first)]
            wrapped = [(function, call.args[1:]) for function in first]  # checkpoint(block, x, flag)
            for function, arguments in ((call.func, call.args), *wrapped):
                for callee, rest in self._callees(function, arguments):
                    if names := frozenset(self._arguments(callee, rest, call.keywords)):
                        yield callee, names

    def _callees(
        self, function: ast.expr, arguments: list[ast.expr]
    ) -> Iterator[tuple[FunctionType | MethodType, list[ast.expr]]]:
        """Yield what a call runs, with its further arguments where the first is the module itself."""
        for callee in (c for held in self._held(function) for c in _called(held)):
            own = arguments and isinstance(arguments[0], ast.Name) and arguments[0].id == self._first
            if own and isinstance(callee, FunctionType):
                yield MethodType(callee, self._owner), arguments[1:]
            else:
                yield callee, arguments

    def _arguments(
        self, callee: FunctionType | MethodType, arguments: list[ast.expr], keywords: list[ast.keyword]
    ) -> Iterator[str]:
        parameters = inspect.signature(callee).parameters.values()
        positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
        for place, value in enumerate(arguments):
            if self._follows(value):
                several = isinstance(value, ast.Starred)
                yield from (positional + rest)[place:] if several else positional[place : place + 1] or rest
        options = [
            p.name for p in parameters if p.default is not p.empty and p.name not in positional[: len(arguments)]
        ]
        others = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        named = {p.name for p in parameters} - {*rest, *others}
        for keyword in keywords:
            if self._follows(keyword.value):
                own = [keyword.arg] if keyword.arg in named else others
                yield from [*options, *others] if keyword.arg is None else own

    def _follows(self, value: ast.expr) -> bool:
        """Whether a value is an argument of forward, or is decided by some without being computed from features."""
        if isinstance(value, ast.Name):
            return value.id in self._names
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute) and self._follows(value.func.value):
                return True
            parts = (*value.args, *(keyword.value for keyword in value.keywords))
            if not any(map(self._follows, parts)):
                return False
            return isinstance(value.func, ast.Name) and value.func.id in vars(builtins) or self._gives(value)
        if isinstance(value, ast.Attribute) and path_of(value) in self._names:
            return True
        inner = (c for c in ast.iter_child_nodes(value) if isinstance(c, ast.expr))
        return isinstance(value, _COMBINING) and any(map(self._follows, inner))

    def _gives(self, call: ast.Call) -> bool:
        """Whether a call with such arguments makes an object of them, or is of a function that returns them."""
        for held in self._held(call.func):
            if isinstance(held, type) and not issubclass(held, (nn.Module, Tensor)):
                return True
        callees = () if self._is_module(call.func) else self._callees(call.func, call.args)
        return any(
            self._looks_into(callee, frozenset(self._arguments(callee, rest, call.keywords)))
            for callee, rest in callees
        )

    def _looks_into(self, callee: FunctionType | MethodType, names: frozenset[str]) -> bool:
        """Whether a function that gets such arguments under some names returns such; one that calls itself does not."""
        key = callee.__code__, id(getattr(callee, "__self__", None)), names
        tree = syntax_of(callee.__code__) if names else None
        if key not in self._returned and tree is not None:
            self._returned[key] = False
            self._returned[key] = _Reader(callee, tree, names, self._returned).returns()
        return self._returned.get(key, False)

    def _is_module(self, node: ast.expr) -> bool:
        return any(isinstance(held, nn.Module) for held in self._held(node))

    def _held(self, node: ast.expr, depth: int = 3) -> Iterator[Any]:
        """Yield what an expression may be of the globals, the module and its parts."""
        match node:
            case ast.Name(id=name):
                yield from self._variable(name, depth)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if isinstance(self._owner, nn.Module):
                    yield from _inherited(self._owner, self._code, name)
            case ast.Attribute(value=value, attr=name) if not isinstance(value, ast.Call):
                yield from (_attribute(held, name) for held in self._held(value, depth))
            case ast.Subscript(value=value):
                yield from (item for held in self._held(value, depth) for item in _items(held))

    def _variable(self, name: str, depth: int) -> Iterator[Any]:
        if name == self._first:
            yield self._owner
        elif not any(b.replaces for b in self._bound.get(name, ())):
            yield self._space.get(name)
        elif depth:
            parts = (part for binding in self._bound[name] for part in _parts(binding.value))
            for held in (h for part in parts for h in self._held(part, depth - 1)):
                yield held
                yield from _items(held)


@functools.cache
def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@functools.cache
def _chosen(tree: ast.AST, owner: str | None) -> list[tuple[ast.expr, frozenset[str], bool]]:
    """Return what decides on constants: the names that are bound to some, and whether one is returned."""
    bound = {id(b.node): name for name, own in bindings(tree, owner).items() for b in own if _is_constant(b.value)}
    returned = {id(n): n.lineno for n in ast.walk(tree) if isinstance(n, ast.Return) and _is_constant(n.value)}
    result: list[tuple[ast.expr, frozenset[str], bool]] = []
    for node in ast.walk(tree) if bound or returned else ():
        if isinstance(node, (ast.If, ast.While, ast.Match)):
            blocks = [c.body for c in node.cases] if isinstance(node, ast.Match) else [node.body, node.orelse]
            inside = [n for block in blocks for statement in block for n in ast.walk(statement)]
            leaves = any(isinstance(n, ast.Return) for n in inside)
            later = leaves and any(line > (node.end_lineno or 0) for line in returned.values())
            names = frozenset(bound[id(n)] for n in inside if id(n) in bound)
            if names or later or any(id(n) in returned for n in inside):
                test = node.subject if isinstance(node, ast.Match) else node.test
                result.append((test, names, later or any(id(n) in returned for n in inside)))
    return result


@functools.cache
def _results(tree: ast.AST) -> list[ast.expr]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]


def _is_constant(value: ast.expr | None) -> bool:
    if isinstance(value, ast.UnaryOp):
        return _is_constant(value.operand)
    return isinstance(value, ast.Constant)


def _inherited(owner: nn.Module, code: CodeType, name: str) -> Iterator[MethodType]:
    """Yield the method that ``super()`` gives in a method of an object's class."""
    order = type(owner).__mro__
    own = (base for base in order if any(_code_of(held) is code for held in vars(base).values()))
    start = next((order.index(base) + 1 for base in own), len(order))
    for function in (vars(base)[name] for base in order[start:] if name in vars(base)):
        if isinstance(function, FunctionType):
            yield MethodType(function, owner)
        return


def _code_of(held: Any) -> CodeType | None:
    return getattr(inspect.unwrap(held), "__code__", None) if isinstance(held, FunctionType) else None


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression, and what ``enumerate``, ``zip`` and the like are called with."""
    yield value
    for argument in value.args if isinstance(value, ast.Call) else ():
        yield from _parts(argument)


def _attribute(held: Any, name: str) -> Any:
    """Return an attribute without running a property."""
    if isinstance(held, ModuleType):
        return getattr(held, name, None)
    if not isinstance(held, (nn.Module, type)):
        return None
    for table in (held._modules, vars(held)) if isinstance(held, nn.Module) else ():
        if name in table:
            return table[name]
    function = inspect.getattr_static(held if isinstance(held, type) else type(held), name, None)
    if isinstance(function, staticmethod):
        return function.__func__
    if isinstance(held, type):
        return function if isinstance(function, FunctionType) else None
    return MethodType(function, held) if isinstance(function, FunctionType) else None


def _items(held: Any) -> Iterator[Any]:
    """Yield the modules and functions in a container."""
    if isinstance(held, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        yield from held._modules.values()
    elif isinstance(held, (list, tuple, dict)):
        items = held.values() if isinstance(held, dict) else held
        yield from (item for item in items if isinstance(item, (nn.Module, FunctionType, MethodType)))


def _called(held: Any) -> Iterator[FunctionType | MethodType]:
    """Yield the function, or the bound method, that runs where something is called, behind its decorators."""
    if isinstance(held, nn.Module):
        held = _attribute(held, "forward")
    function = inspect.unwrap(held.__func__ if isinstance(held, MethodType) else held) if callable(held) else None
    if isinstance(function, FunctionType) and not str(function.__module__).startswith("torch."):
        yield MethodType(function, held.__self__) if isinstance(held, MethodType) else function
