"""Calls of what a variable holds: another module or function where code that did not run has assigned it."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

from torch import nn

from engine.flow.argument_flow import Reader, read
from engine.flow.branches import RESULT
from engine.flow.choices import Choices
from engine.source.bindings import FILLS, bindings
from engine.source.callees import items
from engine.source.syntax import nodes_of

__all__ = ["HeldCall", "held_calls", "is_called", "items_in"]

_CARRIERS = frozenset("dict enumerate filter iter list next reversed set sorted tuple zip".split())
"""Builtins whose results hold what they get."""

_PICKS = frozenset("__iter__ __next__ copy get items pop popleft popitem setdefault values".split())
"""Methods of containers that return their items."""

_CONTAINED = FILLS | _PICKS | frozenset("clear count discard index keys remove reverse sort".split())
_METHODS = frozenset({"__call__", "forward"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class HeldCall:
    """A call of what a variable holds, or a call that is passed it.

    Attributes:
        code: of the function.
        owner: the module whose method that is; None of a plain function.
        node: the call.
        modules: those that the variable may hold.
        is_complete: whether it holds nothing else but functions of torch.
    """

    code: CodeType
    owner: nn.Module | None
    node: ast.Call
    modules: Sequence[nn.Module]
    is_complete: bool


def held_calls(model: nn.Module, choices: Choices) -> list[HeldCall]:
    """Return the calls of variables that hold different modules or functions, as code chooses.

    Args:
        model: the model; its forward is analysed, with all modules, methods and functions that it calls.
        choices: the variables and expressions.
    """
    return [call for reader in read(model, (), choices, _CallReader)[0] for call in reader.held_calls()]


def is_called(tree: ast.AST, variable: str) -> bool:
    """Whether a function calls what a variable holds, or an item of that, also under other names.

    Args:
        tree: syntax of the function.
        variable: its name.

    Example:
        >>> tree = ast.parse("for step in reversed(steps):\\n    h = step(h)")
        >>> is_called(tree, "steps"), is_called(tree, "h")
        (True, False)
    """
    return variable in _called(tree)


@functools.cache
def _called(tree: ast.AST) -> frozenset[str]:
    names: set[str] = set()
    for call in nodes_of(tree, ast.Call):
        names |= {name for part in _alternatives(call.func) for name in _root(part)}
    bound = bindings(tree)
    waiting = list(names)
    while waiting:
        for binding in bound.get(waiting.pop(), ()):
            new = {name for part in _alternatives(binding.value) for name in _root(part)} - names
            names |= new
            waiting += new
    return frozenset(names)


def _alternatives(value: ast.expr) -> Iterator[ast.expr]:
    yield value
    for part in items_in(value):
        yield from _alternatives(part)


def _root(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Name):
        yield value.id


def items_in(value: ast.expr) -> Sequence[ast.expr]:
    """Return the parts of an expression that its value is, or holds: the items of a list, one side of a choice.

    Example:
        >>> texts = ("[a, *b]", "a if c else b", "partial(f, n)", "list(steps)[0]", "f(a)", "steps.pop()")
        >>> [[ast.unparse(p) for p in items_in(ast.parse(text, mode="eval").body)] for text in texts]
        [['a', '*b'], ['a', 'b'], ['f'], ['list(steps)'], [], ['steps']]
    """
    match value:
        case ast.Subscript(slice=ast.Tuple(elts=index)) if any(isinstance(part, ast.Slice) for part in index):
            return []  # a part of a tensor
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.NamedExpr(value=inner):
            return [inner]
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return elements
        case ast.Dict(values=elements) | ast.BoolOp(values=elements):
            return elements
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            return [one, other]
        case ast.ListComp(elt=inner) | ast.SetComp(elt=inner) | ast.GeneratorExp(elt=inner) | ast.DictComp(value=inner):
            return [inner]
        case ast.Attribute(value=inner, attr=name) if name in _METHODS:
            return [inner]
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[first, *_]):
            return [first]
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CARRIERS:
            return args
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _PICKS:
            return [inner]
    return []


class _CallReader(Reader):
    """Reads where one function calls, or passes on, what variables hold that code chooses."""

    def _further_variables(self) -> Iterator[str]:
        for name in self.bound.keys() - self.names:
            if any(self.follows(b.value) for b in self.bound[name]):
                yield name

    def follows(self, value: ast.expr) -> bool:
        """Whether a value is, or holds, a module or a function that code chooses."""
        if isinstance(value, ast.Name):
            return value.id in self.names
        if not self.choices.expressions.isdisjoint([value]) or any(map(self.follows, items_in(value))):
            return True
        if not isinstance(value, ast.Call):
            return False
        if self._creates_module(value):
            return any(map(self.follows, value.args))
        return not _is_builtin(value.func) and self.returns_argument(value)

    def returns(self) -> bool:
        """Whether the function returns such a module or function."""
        results = (node.value for node in nodes_of(self.tree, ast.Return) if node.value is not None)
        return RESULT in self.names or any(map(self.follows, results))

    def _creates_module(self, call: ast.Call) -> bool:
        return any(isinstance(c, type) and issubclass(c, nn.Module) for c in self._candidates(call.func))

    def held_calls(self) -> Iterator[HeldCall]:
        """Yield the calls of such modules and functions, and the calls that are passed one and cannot be read."""
        for call in nodes_of(self.tree, ast.Call):
            if held := [expr for expr in self._called_in(call) if self.follows(expr)]:
                modules: dict[int, nn.Module] = {}
                is_complete = _Held(self, modules).add(*held)
                owner = self._owner if isinstance(self._owner, nn.Module) else None
                yield HeldCall(self.code, owner, call, list(modules.values()), is_complete)

    def _called_in(self, call: ast.Call) -> list[ast.expr]:
        function = call.func
        if isinstance(function, ast.Attribute) and not self.follows(function):
            called = [] if function.attr in _CONTAINED else [function.value]
        else:
            called = [function]
        if any(map(self.follows, called)):
            return called
        passes = items_in(call) or self._creates_module(call) or any(True for _ in self._callees(function, call.args))
        if passes or isinstance(function, ast.Attribute) and function.attr in _CONTAINED:
            return []
        if _is_builtin(function) and getattr(function, "id", "") != "map":
            return []
        return [*call.args, *(keyword.value for keyword in call.keywords)]


class _Held:
    """Collects the modules that expressions of a function may stand for.

    Args:
        reader: of the function.
        modules: is extended, by identity.
    """

    def __init__(self, reader: _CallReader, modules: dict[int, nn.Module]) -> None:
        self._reader, self._modules, self._seen = reader, modules, set[str]()

    def add(self, *exprs: ast.expr) -> bool:
        """Add what expressions may stand for; return whether that is nothing but modules and torch's functions."""
        complete = [self._add(expr) for expr in exprs]  # all of them, also behind one that is something else
        return all(complete)

    def _add(self, expr: ast.expr) -> bool:
        if isinstance(expr, ast.Constant):
            return True
        if isinstance(expr, ast.Name) and expr.id in self._reader.bound:
            is_new = expr.id not in self._seen
            self._seen.add(expr.id)
            values = [b.value for b in self._reader.bound[expr.id]]
            return not is_new or (self.add(*values) and expr.id not in self._arguments())
        if isinstance(expr, (ast.Name, ast.Attribute)):
            return self._add_objects(expr)
        if isinstance(expr, ast.Lambda):
            self.add(*nodes_of(expr, ast.Attribute))
            return False
        if isinstance(expr, ast.Subscript) and not isinstance(expr.value, ast.Name):
            return self._add_objects(expr.value)
        if isinstance(expr, ast.Call) and getattr(expr.func, "id", "") == "getattr" and len(expr.args) > 1:
            return self._is_of_torch(expr.args[0]) and self.add(*expr.args[2:])
        inner = items_in(expr)
        if isinstance(expr, ast.Call) and not inner:
            kinds = list(self._reader._candidates(expr.func))
            of_torch = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module)]
            is_layer = bool(of_torch) and all(kind.__module__.startswith("torch.") for kind in of_torch)
            return self.add(*expr.args) and is_layer if of_torch else _is_carrier(expr.func)
        return self.add(*inner) and (bool(inner) or isinstance(expr, (ast.List, ast.Tuple, ast.Dict)))

    def _is_of_torch(self, owner: ast.expr) -> bool:
        """Whether an expression is a Python module of torch, whose attributes are functions and classes."""
        held = list(self._reader._candidates(owner))
        return bool(held) and all(isinstance(m, ModuleType) and m.__name__.startswith("torch.") for m in held)

    def _arguments(self) -> Collection[str]:
        code = self._reader.code
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def _add_objects(self, expr: ast.expr) -> bool:
        held = [candidate for candidate in self._reader._candidates(expr) if candidate is not None]
        complete = [self._add_object(candidate) for candidate in held]
        return bool(held) and all(complete)

    def _add_object(self, candidate: Any) -> bool:
        inner = list(items(candidate))
        if isinstance(candidate, nn.Module):
            self._modules[id(candidate)] = candidate
        for item in inner:
            self._add_object(item)
        if isinstance(candidate, (nn.Module, BuiltinFunctionType)):
            return True
        if isinstance(candidate, (list, tuple, dict)):
            return len(inner) == len(candidate) and all(isinstance(item, nn.Module) for item in inner)
        return str(getattr(candidate, "__module__", "")).startswith("torch.")


def _is_builtin(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in vars(builtins)


def _is_carrier(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in _CARRIERS
