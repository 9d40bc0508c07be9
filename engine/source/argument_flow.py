"""Flow of the arguments of forward: which arguments of other functions receive them, under which names."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from engine.source.bindings import bindings, path_of
from engine.source.branches import syntax_of
from engine.source.sized_places import is_at
from engine.source.static_attributes import attribute_of_a_part, static_attribute

__all__ = ["passed_arguments"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_TRANSPARENT = (
    ast.Attribute, ast.BoolOp, ast.Compare, ast.Dict, ast.IfExp, ast.List, ast.NamedExpr, ast.Starred, ast.Subscript,
    ast.Tuple, ast.UnaryOp,
)  # fmt: skip
"""Expressions that depend on an argument if one of their parts does."""

_DECISIONS = (ast.BoolOp, ast.Compare, ast.UnaryOp)


def passed_arguments(
    model: nn.Module,
    arguments: Collection[str],
    sized: Collection[str] = (),
    others: Sequence[FunctionType | MethodType] = (),
) -> Mapping[CodeType, frozenset[str]]:
    """Return the arguments of methods and functions that receive arguments of forward, or values that these choose.

    Args:
        model: the model; its forward is read, and all modules, methods and functions that this calls.
        arguments: names of arguments of its forward.
        sized: places, as files and lines, at which sizes decide that differ between inputs: what is chosen there is
            followed as well.
        others: functions with such places, and those that call them.

    Returns:
        Names of arguments by code of the function, without those of forward itself.

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
    waiting = [(method, frozenset(arguments)) for method in _functions_run_by(model)]
    waiting += [(function, frozenset()) for function in others]
    seen: set[tuple[CodeType, int, frozenset[str]]] = set()
    codes = frozenset(function.__code__ for function in others)
    known_results: dict[tuple[CodeType, int, frozenset[str]], bool] = {}
    while waiting:
        function, names = waiting.pop()
        key = function.__code__, id(getattr(function, "__self__", None)), names
        tree = None if key in seen else syntax_of(function.__code__)
        seen.add(key)
        if tree is None:
            continue
        for callee, passed in _Reader(function, tree, names, known_results, sized, codes).passed():
            if not passed <= result[callee.__code__]:
                result[callee.__code__] |= passed
            waiting.append((callee, result[callee.__code__]))
    return dict(result)


class _Reader:
    """Reads which arguments one function passes on.

    Args:
        function: the function, or the method of a module.
        tree: its syntax.
        names: its arguments that the caller of the model chooses.
        known_results: whether functions return such arguments, by function and names of arguments.
        sized: as for `passed_arguments`.
        codes: of the functions with such places, and of those that call them.
    """

    def __init__(
        self,
        function: FunctionType | MethodType,
        tree: ast.FunctionDef | ast.AsyncFunctionDef,
        names: Collection[str],
        known_results: dict[tuple[CodeType, int, frozenset[str]], bool],
        sized: Collection[str] = (),
        codes: Collection[CodeType] = (),
    ) -> None:
        self._tree, self._space, self._code = tree, inspect.unwrap(function).__globals__, function.__code__
        self._known_results, self._sized, self._codes = known_results, sized, codes
        self._owner = function.__self__ if isinstance(function, MethodType) else None
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._self_name = arguments[0].arg if arguments and self._owner is not None else None
        self._bound = bindings(tree, self._self_name)
        self._names = set(names)
        while more := set(self._further_variables()) - self._names:
            self._names |= more

    def _further_variables(self) -> Iterator[str]:
        """Yield further variables that hold such arguments, or constants that these choose."""
        for name in self._bound.keys() - self._names:
            if any(self._follows(b.value) for b in self._bound[name]):
                yield name
        for test, names, _ in _constants_chosen(self._tree, self._self_name):
            if not names <= self._names and self._follows(test):
                yield from names

    def returns(self) -> bool:
        """Whether the function returns such an argument, or a constant that one chooses."""
        if any(
            self._follows(test)
            for test, _, is_returned in _constants_chosen(self._tree, self._self_name)
            if is_returned
        ):
            return True
        return any(self._is_chosen(value) for value in _returned_expressions(self._tree))

    def _is_chosen(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            choices = value.body, value.orelse
            return any(map(self._is_chosen, choices)) or (self._follows(value.test) and any(map(_is_constant, choices)))
        return self._follows(value)

    def passed(self) -> Iterator[tuple[FunctionType | MethodType, frozenset[str]]]:
        """Yield the functions and methods that it calls with such arguments, with the names that these have there."""
        for call in _calls(self._tree):
            if not any(map(self._follows, (*call.args, *(keyword.value for keyword in call.keywords)))):
                continue
            first = [a for a in call.args[:1] if not (isinstance(a, ast.Name) and a.id == self._self_name)]
            wrapped = [(function, call.args[1:]) for function in first]  # checkpoint(block, x, flag)
            for function, arguments in ((call.func, call.args), *wrapped):
                for callee, rest in self._callees(function, arguments):
                    if names := frozenset(self._arguments(callee, rest, call.keywords)):
                        yield callee, names

    def _callees(
        self, function: ast.expr, arguments: list[ast.expr]
    ) -> Iterator[tuple[FunctionType | MethodType, list[ast.expr]]]:
        """Yield the functions that a call runs, with their arguments; a module itself as the first one is left out."""
        for callee in (c for candidate in self._candidates(function) for c in _functions_run_by(candidate)):
            own = arguments and isinstance(arguments[0], ast.Name) and arguments[0].id == self._self_name
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
        others = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        named = {p.name for p in parameters} - {*rest, *others}
        options = named - {*positional[: len(arguments)], *(keyword.arg for keyword in keywords)}
        for keyword in keywords:
            if self._follows(keyword.value):
                own = [keyword.arg] if keyword.arg in named else others
                yield from [*options, *others] if keyword.arg is None else own

    def _follows(self, value: ast.expr) -> bool:
        """Whether a value is an argument of forward, or is chosen by some without being computed from features."""
        if isinstance(value, ast.Name):
            return value.id in self._names
        if self._sized and isinstance(value, _DECISIONS) and is_at(value, self._code.co_filename, self._sized):
            return True
        if isinstance(value, ast.Call):
            if self._sized and self._returns_argument(value):
                return True
            if isinstance(value.func, ast.Attribute) and self._follows(value.func.value):
                return True
            parts = (*value.args, *(keyword.value for keyword in value.keywords))
            if not any(map(self._follows, parts)):
                return False
            return isinstance(value.func, ast.Name) and value.func.id in vars(builtins) or self._returns_argument(value)
        if isinstance(value, ast.Attribute) and path_of(value) in self._names:
            return True
        inner = (c for c in ast.iter_child_nodes(value) if isinstance(c, ast.expr))
        return isinstance(value, _TRANSPARENT) and any(map(self._follows, inner))

    def _returns_argument(self, call: ast.Call) -> bool:
        """Whether a call with such arguments creates an object from them, or runs a function that returns them."""
        for candidate in self._candidates(call.func):
            if isinstance(candidate, type) and not issubclass(candidate, (nn.Module, Tensor)):
                return True
        callees = () if self._is_module(call.func) else self._callees(call.func, call.args)
        return any(
            self._function_returns_argument(callee, frozenset(self._arguments(callee, rest, call.keywords)))
            for callee, rest in callees
        )

    def _function_returns_argument(self, callee: FunctionType | MethodType, names: frozenset[str]) -> bool:
        """Whether a function that receives such arguments under some names returns one; a recursive one does not."""
        key = callee.__code__, id(getattr(callee, "__self__", None)), names
        tree = syntax_of(callee.__code__) if names or callee.__code__ in self._codes else None
        if key not in self._known_results and tree is not None:
            self._known_results[key] = False
            self._known_results[key] = self._reader(callee, tree, names).returns()
        return self._known_results.get(key, False)

    def _reader(
        self, function: FunctionType | MethodType, tree: ast.FunctionDef | ast.AsyncFunctionDef, names: frozenset[str]
    ) -> _Reader:
        return _Reader(function, tree, names, self._known_results, self._sized, self._codes)

    def _is_module(self, node: ast.expr) -> bool:
        return any(isinstance(candidate, nn.Module) for candidate in self._candidates(node))

    def _candidates(self, node: ast.expr, depth: int = 3) -> Iterator[Any]:
        """Yield the globals, parts of the module and methods that an expression may evaluate to."""
        match node:
            case ast.Name(id=name):
                yield from self._variable(name, depth)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if isinstance(self._owner, nn.Module):
                    yield from _inherited(self._owner, self._code, name)
            case ast.Attribute(value=value, attr=name) if not isinstance(value, ast.Call):
                yield from (_attribute(candidate, name) for candidate in self._candidates(value, depth))
            case ast.Subscript(value=value):
                yield from (item for candidate in self._candidates(value, depth) for item in _items(candidate))

    def _variable(self, name: str, depth: int) -> Iterator[Any]:
        if name == self._self_name:
            yield self._owner
        elif not any(b.replaces for b in self._bound.get(name, ())):
            yield self._space.get(name)
        elif depth:
            parts = (part for binding in self._bound[name] for part in _parts(binding.value))
            for candidate in (h for part in parts for h in self._candidates(part, depth - 1)):
                yield candidate
                yield from _items(candidate)


@functools.cache
def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@functools.cache
def _constants_chosen(tree: ast.AST, owner: str | None) -> list[tuple[ast.expr, frozenset[str], bool]]:
    """Return the conditions that choose constants, the variables they are assigned to, and whether one is returned."""
    bound = {id(b.node): name for name, own in bindings(tree, owner).items() for b in own if _is_constant(b.value)}
    constant_returns = {id(n): n.lineno for n in ast.walk(tree) if isinstance(n, ast.Return) and _is_constant(n.value)}
    result: list[tuple[ast.expr, frozenset[str], bool]] = []
    for node in ast.walk(tree) if bound or constant_returns else ():
        if isinstance(node, (ast.If, ast.While, ast.Match)):
            blocks = [c.body for c in node.cases] if isinstance(node, ast.Match) else [node.body, node.orelse]
            inside = [n for block in blocks for statement in block for n in ast.walk(statement)]
            leaves = any(isinstance(n, ast.Return) for n in inside)
            later = leaves and any(line > (node.end_lineno or 0) for line in constant_returns.values())
            names = frozenset(bound[id(n)] for n in inside if id(n) in bound)
            if names or later or any(id(n) in constant_returns for n in inside):
                test = node.subject if isinstance(node, ast.Match) else node.test
                result.append((test, names, later or any(id(n) in constant_returns for n in inside)))
    return result


@functools.cache
def _returned_expressions(tree: ast.AST) -> list[ast.expr]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]


def _is_constant(value: ast.expr | None) -> bool:
    if isinstance(value, ast.UnaryOp):
        return _is_constant(value.operand)
    return isinstance(value, ast.Constant)


def _inherited(owner: nn.Module, code: CodeType, name: str) -> Iterator[MethodType]:
    """Yield the method that ``super()`` finds in a method of an object's class."""
    order = type(owner).__mro__
    own = (base for base in order if any(_code_of(candidate) is code for candidate in vars(base).values()))
    start = next((order.index(base) + 1 for base in own), len(order))
    for function in (vars(base)[name] for base in order[start:] if name in vars(base)):
        if isinstance(function, FunctionType):
            yield MethodType(function, owner)
        return


def _code_of(candidate: Any) -> CodeType | None:
    return getattr(inspect.unwrap(candidate), "__code__", None) if isinstance(candidate, FunctionType) else None


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression, and the arguments of ``enumerate``, ``zip`` and the like."""
    yield value
    for argument in value.args if isinstance(value, ast.Call) else ():
        yield from _parts(argument)


def _attribute(candidate: Any, name: str) -> Any:
    """Return an attribute without evaluating properties."""
    if isinstance(candidate, ModuleType):
        held = static_attribute(candidate, name)
        return attribute_of_a_part(candidate, name) if held is None else held
    if not isinstance(candidate, (nn.Module, type)):
        return None
    for table in (candidate._modules, vars(candidate)) if isinstance(candidate, nn.Module) else ():
        if name in table:
            return table[name]
    function = inspect.getattr_static(candidate if isinstance(candidate, type) else type(candidate), name, None)
    if isinstance(function, staticmethod):
        return function.__func__
    if isinstance(candidate, type):
        return function if isinstance(function, FunctionType) else None
    return MethodType(function, candidate) if isinstance(function, FunctionType) else None


def _items(candidate: Any) -> Iterator[Any]:
    """Yield the modules and functions in a container."""
    if isinstance(candidate, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        yield from candidate._modules.values()
    elif isinstance(candidate, (list, tuple, dict)):
        items = candidate.values() if isinstance(candidate, dict) else candidate
        yield from (item for item in items if isinstance(item, (nn.Module, FunctionType, MethodType)))


def _functions_run_by(candidate: Any) -> Iterator[FunctionType | MethodType]:
    """Yield the function or bound method that a call of an object runs, behind its decorators."""
    if isinstance(candidate, nn.Module):
        candidate = _attribute(candidate, "forward")
    function = (
        inspect.unwrap(candidate.__func__ if isinstance(candidate, MethodType) else candidate)
        if callable(candidate)
        else None
    )
    if isinstance(function, FunctionType) and not str(function.__module__).startswith("torch."):
        yield MethodType(function, candidate.__self__) if isinstance(candidate, MethodType) else function
