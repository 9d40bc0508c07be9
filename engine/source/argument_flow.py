"""Flow of the arguments of forward: which arguments of other functions receive them, under which names."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from engine.source.bindings import bindings, path_of
from engine.source.branches import syntax_of
from engine.source.callees import attribute_of, functions_run_by, inherited, items, parts
from engine.source.sized_places import is_at

__all__ = ["RESULT", "Choices", "chosen_calls", "passed_arguments"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_TRANSPARENT = (
    ast.Attribute, ast.BoolOp, ast.Compare, ast.Dict, ast.IfExp, ast.List, ast.NamedExpr, ast.Starred, ast.Subscript,
    ast.Tuple, ast.UnaryOp,
)  # fmt: skip
"""Expressions that depend on an argument if one of their parts does."""

RESULT = "return"
"""Stands for what a function returns among its variables."""

_COUNTS = frozenset({"range", "slice"})
_DECISIONS = (ast.BoolOp, ast.Compare, ast.UnaryOp)


@dataclass(frozen=True)
class Choices:
    """What code chooses otherwise for other inputs.

    Attributes:
        functions: those in which it does, and those that call them.
        sized: places, as files and lines, at which sizes decide that differ between inputs.
        expressions: parts of conditional expressions that did not run, and may run for other inputs.
        variables: names by code of the function, that code which did not run assigns a number to, or `RESULT`.
    """

    functions: Sequence[FunctionType | MethodType] = ()
    sized: Collection[str] = ()
    expressions: Collection[ast.AST] = ()
    variables: Mapping[CodeType, Collection[str]] = field(default_factory=dict)

    @functools.cached_property
    def codes(self) -> frozenset[CodeType]:
        """The code of the functions."""
        return frozenset(function.__code__ for function in self.functions)


def passed_arguments(
    model: nn.Module, arguments: Collection[str], choices: Choices | None = None
) -> Mapping[CodeType, frozenset[str]]:
    """Return the arguments of methods and functions that receive arguments of forward, or values that these choose.

    Args:
        model: the model; its forward is read, and all modules, methods and functions that this calls.
        arguments: names of arguments of its forward.
        choices: what else is followed.

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
    for reader in _readers(model, arguments, choices or Choices(), result):
        del reader
    return dict(result)


def chosen_calls(model: nn.Module, choices: Choices) -> Mapping[CodeType, Mapping[tuple[int, int], bool]]:
    """Return the calls, operators and subscripts that get a number which code chooses.

    Args:
        model: the model; its forward is read, and all modules, methods and functions that this calls.
        choices: what is chosen.

    Returns:
        Lines and columns at which they end, each with whether it may pick from a list, or count, by code of the
        function.
    """
    result: dict[CodeType, dict[tuple[int, int], bool]] = defaultdict(dict)
    for reader in _readers(model, (), choices, defaultdict(frozenset)):
        result[reader.code].update(reader.chosen())
    return result


def _readers(
    model: nn.Module, arguments: Collection[str], choices: Choices, result: dict[CodeType, frozenset[str]]
) -> Iterator[_Reader]:
    """Yield what reads each function that receives arguments; these are added to the result."""
    waiting = [(method, frozenset(arguments)) for method in functions_run_by(model)]
    waiting += [(function, frozenset()) for function in choices.functions]
    seen: set[tuple[CodeType, int, frozenset[str]]] = set()
    known_results: dict[tuple[CodeType, int, frozenset[str]], bool] = {}
    while waiting:
        function, names = waiting.pop()
        key = function.__code__, id(getattr(function, "__self__", None)), names
        tree = None if key in seen else syntax_of(function.__code__)
        seen.add(key)
        if tree is None:
            continue
        reader = _Reader(function, tree, names, known_results, choices)
        yield reader
        for callee, passed in reader.passed():
            if not passed <= result[callee.__code__]:
                result[callee.__code__] |= passed
            waiting.append((callee, result[callee.__code__]))


class _Reader:
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
        self._tree, self._space, self.code = tree, inspect.unwrap(function).__globals__, function.__code__
        self._known_results, self._choices = known_results, choices
        self._owner = function.__self__ if isinstance(function, MethodType) else None
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._self_name = arguments[0].arg if arguments and self._owner is not None else None
        self._bound = bindings(tree, self._self_name)
        self._names = {*names, *choices.variables.get(self.code, ())}
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
        if RESULT in self._names or any(
            self._follows(test)
            for test, _, is_returned in _constants_chosen(self._tree, self._self_name)
            if is_returned
        ):
            return True
        return any(self._is_chosen(value) for value in _returned_expressions(self._tree))

    def _is_chosen(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            choices = value.body, value.orelse
            if not set(choices).isdisjoint(self._choices.expressions):
                return True
            return any(map(self._is_chosen, choices)) or (self._follows(value.test) and any(map(_is_constant, choices)))
        return self._follows(value)

    def chosen(self) -> Iterator[tuple[tuple[int, int], bool]]:
        """Yield the ends of calls, operators and subscripts that get such an argument, or what one chooses.

        With each goes whether it may pick from a list, or count.
        """
        for node in ast.walk(self._tree):
            match node:
                case ast.Call(func=function, args=args, keywords=keywords):
                    parts = [*args, *(keyword.value for keyword in keywords)]
                    parts += [function] if isinstance(function, (ast.Name, ast.IfExp)) else []
                case ast.While(test=test):
                    parts = [n for n in ast.walk(test) if isinstance(n, ast.expr)]
                case ast.Subscript(value=value, slice=index) if not self._is_module(value):
                    parts = [n for n in ast.walk(index) if isinstance(n, ast.expr)]
                case ast.BinOp(left=left, right=right):
                    parts = [left, right]
                case ast.AugAssign(value=value):
                    parts = [value]
                case _:
                    continue
            if any(map(self._follows, parts)):
                called: ast.expr | None = getattr(node, "func", None)
                picks = not isinstance(node, (ast.Call, ast.BinOp)) or getattr(called, "id", "") in _COUNTS
                end = node.test if isinstance(node, ast.While) else node
                is_chosen = called is not None and self._follows(called)
                yield (end.end_lineno or end.lineno, end.end_col_offset or 0), picks or is_chosen

    def _is_number(self, value: ast.expr, depth: int = 3) -> bool:
        """Whether an expression is a number, computed from sizes, attributes, and such arguments."""
        match value:
            case ast.Constant() | ast.Attribute():
                return True
            case ast.Name(id=name):
                bound = [binding.value for binding in self._bound.get(name, ())]
                return (
                    name in self._names or bool(bound and depth) and all(self._is_number(b, depth - 1) for b in bound)
                )
            case ast.Subscript(value=ast.Attribute(attr="shape")) | ast.Call(func=ast.Attribute(attr="size")):
                return True
            case ast.Call(func=ast.Name(id=name), args=args):
                return name in vars(builtins) and all(self._is_number(a, depth) for a in args)
            case ast.BinOp(left=left, right=right):
                return self._is_number(left, depth) and self._is_number(right, depth)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return all(self._is_number(element, depth) for element in elements)
            case ast.UnaryOp(operand=operand):
                return self._is_number(operand, depth)
            case ast.IfExp(body=body, orelse=orelse):
                return self._is_number(body, depth) and self._is_number(orelse, depth)
        return False

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
        choices = self._choices
        if choices.sized and _is_number_or_decision(value) and is_at(value, self.code.co_filename, choices.sized):
            return True
        if isinstance(value, ast.IfExp) and not {value.body, value.orelse}.isdisjoint(choices.expressions):
            return True
        if isinstance(value, ast.BinOp) and all(map(self._is_number, (value.left, value.right))):
            return self._follows(value.left) or self._follows(value.right)
        if isinstance(value, ast.Call):
            if choices.functions and self._returns_argument(value):
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
        tree = syntax_of(callee.__code__) if names or callee.__code__ in self._choices.codes else None
        if key not in self._known_results and tree is not None:
            self._known_results[key] = False
            self._known_results[key] = _Reader(callee, tree, names, self._known_results, self._choices).returns()
        return self._known_results.get(key, False)

    def _is_module(self, node: ast.expr) -> bool:
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
            case ast.Subscript(value=value):
                yield from (item for candidate in self._candidates(value, depth) for item in items(candidate))

    def _variable(self, name: str, depth: int) -> Iterator[Any]:
        if name == self._self_name:
            yield self._owner
        elif not any(b.replaces for b in self._bound.get(name, ())):
            yield self._space.get(name)
        elif depth:
            values = (part for binding in self._bound[name] for part in parts(binding.value))
            for candidate in (h for value in values for h in self._candidates(value, depth - 1)):
                yield candidate
                yield from items(candidate)


def _is_number_or_decision(value: ast.expr) -> bool:
    """Whether an expression decides, or makes a plain number of one: ``len(x)``, ``int(h / 2)``, ``math.floor(h)``."""
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
