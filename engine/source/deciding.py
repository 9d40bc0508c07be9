"""Who decides which branch of a function runs: the code that is there, or whoever calls the model."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.source.bindings import Binding, bindings
from engine.source.branches import syntax_of

__all__ = ["Decider", "attribute_code", "is_fixed_property"]

_NEVER = frozenset(
    "is_scripting is_tracing is_compiling is_exporting is_dynamo_compiling is_torchdynamo_compiling".split()
)
"""Functions that say no wherever a model runs as Python."""

_FIXED = (type, torch.dtype, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_KINDS = frozenset({"isinstance", "issubclass", "callable", "type"})
_ATTRIBUTES = frozenset({"hasattr", "getattr"})
_OF_PLAIN_VALUES = frozenset("copy endswith isdigit lower startswith strip upper".split())
"""Methods of lists, dictionaries and texts that change nothing, and that tensors and modules do not have."""

_OF_DATA = frozenset("dtype device requires_grad is_cuda grad_fn is_nested is_sparse".split())
_MISSING = object()
_ALL_LINES = range(sys.maxsize)

_Seen = frozenset[tuple[str, int]]
"""Variables that are looked into, each with the line that sets it."""


@dataclass(frozen=True)
class Decider:
    """What is known where a function decides.

    Attributes:
        tree: the function's syntax.
        space: globals.
        open: names of arguments that whoever calls the model may give: in its forward all, elsewhere those that are
            called as one of forward's.
        settled: tells of a path of attributes of the module (``gate.mode``; ``*.mode`` where it is not known whose
            attribute it is) that nobody sets the last one of them once the model is built.
        ran: tells of syntax whether it ran, or has nothing to run; what did not has no part in a decision.
        owner: the argument that is the module itself; None in a function that is no method.
        kept: as `settled`, though what the attribute holds may change: whether it is None does not. By default as that.
    """

    tree: ast.FunctionDef | ast.AsyncFunctionDef
    space: Mapping[str, Any]
    open: Collection[str]
    settled: Callable[[str], bool]
    ran: Callable[[ast.AST], bool]
    owner: str | None = None
    kept: Callable[[str], bool] | None = None
    _busy: types.CodeType | None = None  # a function that is looked into, which may call itself

    def fixed(self, test: ast.AST) -> bool:
        """Whether an expression comes out as it does whatever is given to the model, and however it is run.

        A statement comes out by the conditions in it.
        """
        return self._fixed(test, frozenset())

    def _fixed(self, node: ast.AST, seen: _Seen) -> bool:
        if not self.ran(node):
            return True
        if isinstance(node, ast.stmt):
            tests = [n.test for n in ast.walk(node) if isinstance(n, (ast.If, ast.IfExp, ast.While))]
            return bool(tests) and all(self._fixed(test, seen) for test in tests)
        if isinstance(node, ast.Name):
            return self._name(node.id, seen, getattr(node, "lineno", None))
        if isinstance(node, ast.Attribute):
            return self._attribute(node, seen)
        if isinstance(node, ast.Call):
            return self._call(node, seen)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and _asks_for_none(node):
            return self._attribute(node.left, seen, self.kept)
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return all(self._fixed(child, seen) for child in children)

    def _name(self, name: str, seen: _Seen, line: int | None = None) -> bool:
        lines = self._lines_that_set(name, line)
        if (name, lines.start) in seen:
            return True
        own, passed = list(self._assigned(name, lines)), name in self._arguments() and not lines.start
        if own or passed:
            is_open = passed and name in self.open
            return not is_open and all(self._fixed(value, seen | {(name, lines.start)}) for value in own)
        value = self.space.get(name, vars(builtins).get(name, _MISSING))
        return value is _MISSING or isinstance(value, _FIXED)

    def _arguments(self) -> set[str]:
        a = self.tree.args
        return {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg is not None}

    def _lines_that_set(self, name: str, line: int | None) -> range:
        """Return where what sets a variable may stand: from the last statement on every way on, as far as a line.

        What comes behind the line counts in a loop only, which comes back to it.
        """
        body = self.tree.body
        inside = next((s for s in body if line is not None and s.lineno <= line <= (s.end_lineno or 0)), None)
        if inside is None:
            return _ALL_LINES
        before = {id(s) for s in body[: body.index(inside)] if isinstance(s, (ast.Assign, ast.AnnAssign))}
        own = self._bindings().get(name, ())
        start = max((b.line for b in own if b.replaces and id(b.node) in before), default=0)
        loops = any(isinstance(n, (ast.For, ast.AsyncFor, ast.While)) for n in ast.walk(inside))
        return range(start, (inside.end_lineno or inside.lineno if loops else line or 0) + 1)

    def _bindings(self) -> Mapping[str, tuple[Binding, ...]]:
        return bindings(self.tree, self.owner)

    def _assigned(self, name: str, lines: range = _ALL_LINES) -> Iterator[ast.AST]:
        """Yield what a variable, or an attribute of one, is set to on some lines."""
        own = self._bindings().get(name, ())
        return (b.value for b in own if b.line in lines and self.ran(b.value))

    def _attribute(self, node: ast.Attribute, seen: _Seen, last: Callable[[str], bool] | None = None) -> bool:
        held = self._held(node)
        if held is not _MISSING:
            return isinstance(held, _FIXED)
        if node.attr in _OF_DATA:
            return False
        path, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            path, inner = [inner.attr, *path], inner.value
        if not self._fixed(inner, seen):
            return False
        start = [] if isinstance(inner, ast.Name) and inner.id == self.owner else ["*"]
        *inside, whole = (".".join([*start, *path[:end]]) for end in range(1, len(path) + 1))
        return all(map(self.settled, inside)) and (last or self.settled)(whole)

    def _held(self, node: ast.expr) -> Any:
        """Return what a global, or an attribute of a Python module, is."""
        if isinstance(node, ast.Name):
            inner = node.id in self._arguments() or any(True for _ in self._assigned(node.id))
            return _MISSING if inner else self.space.get(node.id, _MISSING)
        if isinstance(node, ast.Attribute):
            held = self._held(node.value)
            return getattr(held, node.attr, _MISSING) if isinstance(held, (types.ModuleType, type)) else _MISSING
        return _MISSING

    def _call(self, node: ast.Call, seen: _Seen) -> bool:
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function.lstrip("_") in _NEVER:
            return True
        if function in _KINDS:
            if node.args and isinstance(node.args[0], ast.Attribute):
                return self._attribute(node.args[0], seen)
            root = _root(node.args[0]) if node.args else None
            return root not in self.open
        if function in _ATTRIBUTES and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            owner = ast.Attribute(node.args[0], str(node.args[1].value), ast.Load())
            return self._attribute(owner, seen) and all(self._fixed(a, seen) for a in node.args[2:])
        if function in vars(builtins) and isinstance(node.func, ast.Name):
            return all(self._fixed(a, seen) for a in node.args)
        if function in _OF_PLAIN_VALUES and isinstance(node.func, ast.Attribute):
            return self._fixed(node.func.value, seen) and all(self._fixed(a, seen) for a in node.args)
        return self._inside(node, seen)

    def _inside(self, node: ast.Call, seen: _Seen) -> bool:
        """Whether what a function returns is fixed that does nothing else (``def exists(x): return x is not None``)."""
        held = self._held(node.func)
        tree = syntax_of(held.__code__) if isinstance(held, types.FunctionType) and not held.__closure__ else None
        names = None if tree is None else _bound(tree, node)
        result = None if tree is None else _returned(tree)
        if tree is None or names is None or result is None or held.__code__ is self._busy:
            return False
        open_names = {name for name, value in names.items() if not self._fixed(value, seen)}
        inner = Decider(
            tree, held.__globals__, open_names, lambda name: False, lambda syntax: True, _busy=held.__code__
        )
        return inner.fixed(result)


def attribute_code(kind: type, name: str) -> types.FunctionType | None:
    """Return the function of a property; None for an attribute that is stored.

    Example:
        >>> class Net(torch.nn.Module):
        ...     @property
        ...     def wide(self):
        ...         return self.width > 8
        >>> attribute_code(Net, "wide").__name__, attribute_code(Net, "width")
        ('wide', None)
    """
    held = inspect.getattr_static(kind, name, None)
    function = held.func if isinstance(held, functools.cached_property) else getattr(held, "fget", None)
    if not isinstance(function, types.FunctionType) or str(function.__module__).startswith("torch.nn."):
        return None
    return function


def is_fixed_property(function: types.FunctionType, settled: Callable[[str], bool]) -> bool:
    """Whether a property does nothing but return what comes out the same at all times.

    Args:
        function: of the property.
        settled: tells of a path of attributes of its owner that nobody sets the last one of them.
    """
    tree = syntax_of(function.__code__)
    result = None if tree is None or function.__closure__ else _returned(tree)
    if tree is None or result is None:
        return False
    code = function.__code__
    owner = code.co_varnames[0]
    return Decider(tree, function.__globals__, (), settled, lambda syntax: True, owner, _busy=code).fixed(result)


def _returned(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    """Return what a function returns that does nothing else."""
    body = [n for n in tree.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None


def _bound(tree: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the arguments of a call by name, without those that are left out; None where the text does not say."""
    names = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args)]
    plain = not any(isinstance(a, ast.Starred) for a in call.args) and all(k.arg is not None for k in call.keywords)
    if not plain or len(call.args) > len(names) or tree.args.vararg or tree.args.kwarg:
        return None
    bound = dict(zip(names, call.args, strict=False))
    return bound | {k.arg: k.value for k in call.keywords if k.arg is not None}


def _asks_for_none(node: ast.Compare) -> bool:
    """Whether it is ``x is None``, or ``x is not None``."""
    none = [value for value in node.comparators if isinstance(value, ast.Constant) and value.value is None]
    return len(node.ops) == len(none) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
