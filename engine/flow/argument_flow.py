"""Flow of the arguments of forward: which arguments of other functions receive them, under which names."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

from engine.flow.branches import RESULT
from engine.flow.choices import Choices, functions_in_class, is_plain_class
from engine.numbers.sized_places import is_at
from engine.source.bindings import bindings, path_of
from engine.source.callees import attribute_of, functions_run_by, inherited, items, parts
from engine.source.function_text import syntax_of
from engine.source.instructions import arguments_of
from engine.source.model_code import code_of
from engine.source.syntax import nodes_of

__all__ = ["PassedArguments", "Reader", "are_options", "passed_arguments", "read"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_TRANSPARENT = (
    ast.Attribute, ast.BoolOp, ast.Compare, ast.Dict, ast.IfExp, ast.List, ast.NamedExpr, ast.Starred, ast.Subscript,
    ast.Tuple, ast.UnaryOp,
)  # fmt: skip
"""Expressions that depend on an argument if one of their parts does."""

SomeReader = TypeVar("SomeReader", bound="Reader")

_DECISIONS = (ast.BoolOp, ast.Compare, ast.UnaryOp)


@dataclass(frozen=True)
class PassedArguments:
    """Arguments of methods and functions that receive arguments of forward; those of forward itself are omitted.

    Attributes:
        by_code: their names by code of the function.
        by_owner: the same by code and identity of the module, or of None where a method is called as a function.
    """

    by_code: Mapping[CodeType, frozenset[str]] = field(default_factory=dict)
    by_owner: Mapping[tuple[CodeType, int], frozenset[str]] = field(default_factory=dict)

    def of_module(self, code: CodeType, module: nn.Module) -> frozenset[str]:
        """Return the arguments of a module's method; those of all modules if no call of it is visible.

        Args:
            code: of the method.
            module: whose method it is.
        """
        own = self.by_owner.get((code, id(module)))
        if own is None:
            return self.by_code.get(code, frozenset())
        return own | self.by_owner.get((code, id(None)), frozenset())


def passed_arguments(model: nn.Module, arguments: Collection[str], choices: Choices | None = None) -> PassedArguments:
    """Return the arguments of methods and functions that receive arguments of forward, or values that these choose.

    Args:
        model: the model; its forward is analysed, with all modules, methods and functions that it calls.
        arguments: names of arguments of its forward.
        choices: what else is followed.

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
        >>> passed_arguments(Net(), {"flag"}).by_code[Block.forward.__code__]
        frozenset({'shuffle'})
    """
    return read(model, arguments, choices or Choices(), Reader)[1]


def read(
    model: nn.Module, arguments: Collection[str], choices: Choices, kind: type[SomeReader]
) -> tuple[list[SomeReader], PassedArguments]:
    """Read the functions that receive arguments of forward, or values that these choose.

    Args:
        model, arguments, choices: as for `passed_arguments`.
        kind: class of the readers.

    Returns:
        A reader for each function and choice of its arguments, and what `passed_arguments` returns.
    """
    by_code: dict[CodeType, frozenset[str]] = defaultdict(frozenset)
    by_owner: dict[tuple[CodeType, int], frozenset[str]] = defaultdict(frozenset)
    waiting = [(method, frozenset(arguments)) for method in functions_run_by(model)]
    waiting += [(function, frozenset()) for function in choices.functions]
    seen: set[tuple[CodeType, int, frozenset[str]]] = set()
    known_results: dict[tuple[CodeType, int, frozenset[str]], bool] = {}
    readers: list[SomeReader] = []
    while waiting:
        function, names = waiting.pop()
        key = function.__code__, id(getattr(function, "__self__", None)), names
        tree = None if key in seen else syntax_of(function.__code__)
        seen.add(key)
        if tree is None:
            continue
        readers.append(kind(function, tree, names, known_results, choices))
        for callee, passed in readers[-1].passed():
            owner = callee.__code__, id(getattr(callee, "__self__", None))
            by_code[callee.__code__] |= passed
            by_owner[owner] |= passed
            waiting.append((callee, by_owner[owner]))
    return readers, PassedArguments(dict(by_code), dict(by_owner))


class Reader:
    """Reads which arguments one function passes on.

    Args:
        function: the function, or the method of a module.
        tree: its syntax.
        names: its arguments that the caller of the model chooses.
        known_results: whether functions return such arguments, by function and names of arguments.
        choices: as for `passed_arguments`.

    Attributes:
        code: of the function.
    """

    def __init__(
        self,
        function: FunctionType | MethodType,
        tree: ast.FunctionDef | ast.AsyncFunctionDef,
        names: Collection[str],
        known_results: dict[tuple[CodeType, int, frozenset[str]], bool],
        choices: Choices,
    ) -> None:
        self.tree, self._space, self.code = tree, inspect.unwrap(function).__globals__, function.__code__
        self._known_results, self.choices = known_results, choices
        self._owner = function.__self__ if isinstance(function, MethodType) else None
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._self_name = arguments[0].arg if arguments and self._owner is not None else None
        self.bound = bindings(tree, self._self_name)
        self.names = {*names, *choices.variables.get(self.code, ())}
        while more := set(self._further_variables()) - self.names:
            self.names |= more

    def _further_variables(self) -> Iterator[str]:
        """Yield further variables that hold such arguments, or constants that these choose."""
        for name in self.bound.keys() - self.names:
            if any(self._is_bound_to_followed(name, b.value) for b in self.bound[name]):
                yield name
        for test, names, _ in _constants_chosen(self.tree, self._self_name):
            if not names <= self.names and self.follows(test):
                yield from names

    def _is_bound_to_followed(self, name: str, value: ast.expr) -> bool:
        """Whether a variable holds such an argument, if it is bound to a value."""
        return self.follows(value)

    def returns(self) -> bool:
        """Whether the function returns such an argument, or a constant that one chooses."""
        if RESULT in self.names or any(
            self.follows(test) for test, _, is_returned in _constants_chosen(self.tree, self._self_name) if is_returned
        ):
            return True
        return any(self._is_chosen(value) for value in _returned_expressions(self.tree))

    def _is_chosen(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            choices = value.body, value.orelse
            return any(map(self._is_chosen, choices)) or (self.follows(value.test) and any(map(_is_constant, choices)))
        return self.follows(value)

    def passed(self) -> Iterator[tuple[FunctionType | MethodType, frozenset[str]]]:
        """Yield the functions and methods that are called with such arguments, and the names of these there."""
        for call in _calls(self.tree):
            if not self._receives_argument(call):
                continue
            for kind in filter(is_plain_class, self._candidates(call.func)):  # its methods read what the object keeps
                yield from ((method, frozenset(arguments_of(method.__code__))) for method in functions_in_class(kind))
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
        for callee in (c for candidate in self._candidates(function) for c in functions_run_by(candidate)):
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
            if self.follows(value):
                several = isinstance(value, ast.Starred)
                yield from (positional + rest)[place:] if several else positional[place : place + 1] or rest
        options = [
            p.name for p in parameters if p.default is not p.empty and p.name not in positional[: len(arguments)]
        ]
        others = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        named = {p.name for p in parameters} - {*rest, *others}
        for keyword in keywords:
            if self.follows(keyword.value):
                own = [keyword.arg] if keyword.arg in named else others
                yield from [*options, *self._keys(keyword.value), *others] if keyword.arg is None else own

    def _keys(self, value: ast.expr) -> Iterator[str]:
        """Yield the keys under which displays of a dictionary have such an argument."""
        bound = [binding.value for binding in self.bound.get(value.id, ())] if isinstance(value, ast.Name) else [value]
        for display in bound:
            pairs = zip(display.keys, display.values, strict=True) if isinstance(display, ast.Dict) else ()
            yield from (k.value for k, v in pairs if isinstance(k, ast.Constant) and self.follows(v))  # type: ignore[misc]

    def follows(self, value: ast.expr) -> bool:
        """Whether a value is an argument of forward, or is chosen by such arguments but not computed from features."""
        if isinstance(value, ast.Name):
            return value.id in self.names
        choices = self.choices
        if choices.sized and _is_number_or_decision(value) and is_at(value, self.code.co_filename, choices.sized):
            return True
        if isinstance(value, ast.Call):
            if choices.functions and self.returns_argument(value):
                return True
            if isinstance(value.func, ast.Attribute) and self.follows(value.func.value):
                return True
            if not self._receives_argument(value):
                return False
            return isinstance(value.func, ast.Name) and value.func.id in vars(builtins) or self.returns_argument(value)
        if isinstance(value, ast.Attribute) and path_of(value) in self.names:
            return True
        inner = (c for c in ast.iter_child_nodes(value) if isinstance(c, ast.expr))
        return isinstance(value, _TRANSPARENT) and any(map(self.follows, inner))

    def returns_argument(self, call: ast.Call) -> bool:
        """Whether a call creates an object from such arguments or choices, or runs a function that returns them."""
        for kind in filter(is_plain_class, self._candidates(call.func)):
            if self._receives_argument(call) or self.choices.are_in_class(kind):
                return True
        callees = () if self.is_module(call.func) else self._callees(call.func, call.args)
        return any(
            self._function_returns_argument(callee, frozenset(self._arguments(callee, rest, call.keywords)))
            for callee, rest in callees
        )

    def _receives_argument(self, call: ast.Call) -> bool:
        return any(map(self.follows, (*call.args, *(keyword.value for keyword in call.keywords))))

    def _function_returns_argument(self, callee: FunctionType | MethodType, names: frozenset[str]) -> bool:
        """Whether a function that receives such arguments under some names returns one; a recursive one does not."""
        key = callee.__code__, id(getattr(callee, "__self__", None)), names
        tree = syntax_of(callee.__code__) if names or callee.__code__ in self.choices.codes else None
        if key not in self._known_results and tree is not None:
            self._known_results[key] = False
            reader = type(self)(callee, tree, names, self._known_results, self.choices)
            self._known_results[key] = reader.returns()
        return self._known_results.get(key, False)

    def is_module(self, node: ast.expr) -> bool:
        """Whether an expression may be a module of the network."""
        return any(isinstance(candidate, nn.Module) for candidate in self._candidates(node))

    def _candidates(self, node: ast.expr, depth: int = 3) -> Iterator[Any]:
        """Yield the globals, parts of the module and methods that an expression may evaluate to."""
        match node:
            case ast.Name(id=name):
                yield from self._variable(name, depth)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if isinstance(self._owner, nn.Module):
                    yield from inherited(self._owner, self.code, name)
            case ast.Attribute(value=value, attr=name) if not isinstance(value, ast.Call):
                yield from (attribute_of(candidate, name) for candidate in self._candidates(value, depth))
            case ast.Call(func=function):  # an object of a plain class is called like its class
                yield from filter(is_plain_class, self._candidates(function, depth))
            case ast.Subscript(value=value):
                yield from (item for candidate in self._candidates(value, depth) for item in items(candidate))

    def _variable(self, name: str, depth: int) -> Iterator[Any]:
        if name == self._self_name:
            yield self._owner
        elif not any(b.replaces for b in self.bound.get(name, ())):
            yield self._space.get(name)
        elif depth:
            values = (part for binding in self.bound[name] for part in parts(binding.value))
            for candidate in (h for value in values for h in self._candidates(value, depth - 1)):
                yield candidate
                yield from items(candidate)


def _is_number_or_decision(value: ast.expr) -> bool:
    """Whether an expression is a decision or a plain number: ``len(x)``, ``int(h / 2)``, ``math.floor(h)``."""
    if not isinstance(value, ast.Call):
        return isinstance(value, _DECISIONS)
    function = value.func
    if isinstance(function, ast.Attribute):
        return getattr(function.value, "id", "") == "math"
    return isinstance(function, ast.Name) and function.id in vars(builtins)


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


def are_options(model: nn.Module, rest: str) -> bool:
    """Whether forward only passes ``*rest`` on to functions that name their arguments.

    Then they are not any number of tensors, but options with defaults, which are followed to where they go.
    """
    code = code_of(type(model).forward)
    tree = None if code is None else syntax_of(code)
    if tree is None:
        return False
    unpacked = {a.value for call in nodes_of(tree, ast.Call) for a in call.args if isinstance(a, ast.Starred)}
    if not unpacked.issuperset(n for n in nodes_of(tree, ast.Name) if n.id == rest):
        return False
    receivers = passed_arguments(model, {rest}).by_code
    return bool(receivers) and not any(_gathers(receiver) in names for receiver, names in receivers.items())


def _gathers(code: CodeType) -> str | None:
    """Return the name of a function's ``*args``."""
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & inspect.CO_VARARGS else None
