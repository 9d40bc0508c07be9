"""Reads of a function from outside its arguments and variables: globals, attributes of classes and objects, items.

No code of the user runs: names are looked up in tables, if the code contains them literally.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import CodeType, ModuleType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from engine.source.function_text import lambdas_of_file, syntax_of, text_of
from engine.source.static_attributes import static_attribute, stored_by_property, table_of

__all__ = ["UNSET", "OuterRead", "is_environment", "outer_reads"]


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()
"""Stands for the value of an unset name."""

_CONTAINERS = (dict, OrderedDict, list)
_ENVIRONMENT = ("environ", "getenv")
_UNKNOWN = object()


def is_environment(holder: Any) -> bool:
    """Whether a table is the environment of the process."""
    return holder is os.environ


class OuterRead(NamedTuple):
    """A value that code reads from outside its function.

    Attributes:
        holder: the object with the value: a table, a list, a class, a context variable, or the environment.
        key: key of the value in the holder; None for a context variable.
        node: the expression in the code.
        names: names of the attributes and globals on the way to it.
        from_self: whether it is reached from the module whose method the function is.
    """

    holder: Any
    key: Any
    node: ast.expr
    names: frozenset[str]
    from_self: bool

    @property
    def value(self) -> Any:
        """The current value; `UNSET` if there is none."""
        if isinstance(self.holder, ContextVar):
            try:
                return self.holder.get()
            except LookupError:
                return UNSET
        if isinstance(self.holder, type):
            return static_attribute(self.holder, self.key, UNSET)
        if isinstance(self.holder, list):
            return self.holder[self.key] if -len(self.holder) <= self.key < len(self.holder) else UNSET
        return self.holder.get(self.key, UNSET)

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Run the body with another value; `UNSET` removes it."""
        if isinstance(self.holder, ContextVar):
            token = self.holder.set(value)
            try:
                yield
            finally:
                self.holder.reset(token)
            return
        before = self.value
        self._assign(value)
        try:
            yield
        finally:
            self._assign(before)

    def _assign(self, value: Any) -> None:
        if isinstance(self.holder, type):
            type.__setattr__(self.holder, self.key, value)
        elif value is UNSET:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value

    @property
    def python_module(self) -> str | None:
        """Name of the Python module of which the value is a global; None if the holder is something else."""
        name = self.holder.get("__name__") if isinstance(self.holder, dict) else None
        module = sys.modules.get(name) if isinstance(name, str) else None
        return name if module is not None and vars(module) is self.holder else None

    @property
    def text(self) -> str:
        """The expression as text."""
        return ast.unparse(self.node)

    @property
    def place(self) -> tuple[int, Any]:
        """A key that identifies the holder and the key in it."""
        return id(self.holder), self.key


def outer_reads(
    code: CodeType, space: Mapping[str, Any], owner: nn.Module | None, is_own: Callable[[str], bool]
) -> list[OuterRead]:
    """Return what a function may read from outside.

    Args:
        code: of the function.
        space: its globals.
        owner: its first argument, if that is a module of the model.
        is_own: returns whether a file belongs to the model's code; modules and classes of other files are omitted.

    Example:
        >>> reads = outer_reads(is_environment.__code__, vars(sys.modules[__name__]), None, lambda file: True)
        >>> sorted(read.text for read in reads)
        ['os', 'os.environ']
    """
    tree = syntax_of(code)
    parts: list[Any] = _lambdas(code) if tree is None else tree.body
    if not parts:
        return []
    reader = _Reader(code, ast.Module(parts, []), space, owner, is_own)
    nodes = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.expr))
    reads = [read for read in map(reader.read, nodes) if read is not None]
    reads.sort(key=lambda read: not read.from_self)  # what is read in another way as well is shared
    return list({read.place: read for read in reads}.values())


def _lambdas(code: CodeType) -> list[ast.expr]:
    """Return the results of the lambda functions on the first line of a lambda that take the same arguments."""
    if code.co_name != "<lambda>":
        return []
    try:
        lambdas = lambdas_of_file(text_of(code))
    except (SyntaxError, ValueError):
        return []
    names = list(code.co_varnames[: code.co_argcount])
    on_line = lambdas.get(code.co_firstlineno, ())
    return [n.body for n in on_line if [a.arg for a in (*n.args.posonlyargs, *n.args.args)] == names]


class _Reader:
    """Looks up the values of expressions in a function."""

    def __init__(
        self,
        code: CodeType,
        tree: ast.AST,
        space: Mapping[str, Any],
        owner: nn.Module | None,
        is_own: Callable[[str], bool],
    ) -> None:
        self._space, self._owner, self._is_own = space, owner, is_own
        self._own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *_variables_inside(code)}
        self._self = code.co_varnames[0] if owner is not None and code.co_argcount else None
        self._imported = dict(_imports(tree))

    def read(self, node: ast.expr) -> OuterRead | None:
        """Return the outside value that an expression reads; None if it computes a value, or reads a fixed one."""
        place = next((place for place in self._places(node)), None)
        if place is None:
            return None
        holder, key = place
        root, names = _root(node), _names(node)
        return OuterRead(holder, key, node, names, root is not None and root == self._self)

    def _places(self, node: ast.expr) -> Iterator[tuple[Any, Any]]:
        """Yield the holder and the key of the value that an expression reads."""
        places = _PLACES.get(type(node))
        yield from () if places is None else places(self, node)

    def of_name(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the place of a global, or of what the function imports."""
        module, name = self._imported.get(node.id, (_UNKNOWN, None))
        if name is not None:
            yield from self._of_attribute(module, name)
        elif node.id not in self._own and node.id in self._space and isinstance(self._space, dict):
            yield self._space, node.id

    def of_attribute(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the place of an attribute."""
        return self._of_attribute(self._value(node.value), node.attr)

    def of_subscript(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the place of an item."""
        return self._of_item(self._value(node.value), self._value(node.slice))

    def of_comparison(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the place of a name that is searched in the environment."""
        if isinstance(node.ops[0], (ast.In, ast.NotIn)) and self._value(node.comparators[0]) is os.environ:
            yield from self._of_item(os.environ, self._value(node.left))

    def of_call(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the place of the result of ``getattr``, ``os.getenv``, or a method ``get``."""
        first = self._value(node.args[0]) if node.args else _UNKNOWN
        function = node.func.id if isinstance(node.func, ast.Name) else None
        if function == "getattr" and len(node.args) > 1 and isinstance(key := self._value(node.args[1]), str):
            yield from self._of_attribute(first, key)
        elif self._value(node.func) is os.getenv:
            yield from self._of_item(os.environ, first)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            holder = self._value(node.func.value)
            if isinstance(holder, ContextVar):
                yield holder, None
            else:
                yield from self._of_item(holder, first)

    def _of_attribute(self, holder: Any, name: str) -> Iterator[tuple[Any, Any]]:
        if isinstance(holder, ModuleType):
            table = table_of(holder)
            is_own = name in _ENVIRONMENT if holder is os else self._is_own_module(holder)
            if name in table and isinstance(table, dict) and is_own:
                yield table, name
        elif isinstance(holder, type):
            base = next((base for base in holder.__mro__ if name in vars(base)), None)
            if base is not None and self._is_own_class(base):
                yield base, name
        elif holder is not _UNKNOWN and not isinstance(holder, Tensor):
            table = vars(holder) if isinstance(holder, threading.local) else table_of(holder)
            stored = None if name in table else stored_by_property(cast(Any, type(holder)), name)
            if stored is not None and isinstance(table.get(stored), str):
                name = stored  # a text: the name of an implementation
            if name in table and isinstance(table, dict):
                if holder is not self._owner:  # attributes of the model's modules are looked at elsewhere
                    yield table, name
            else:
                yield from self._of_attribute(type(holder), name)

    def _of_item(self, holder: Any, key: Any) -> Iterator[tuple[Any, Any]]:
        if holder is os.environ and isinstance(key, str):
            yield holder, key
        elif type(holder) is list and type(key) is int:
            yield holder, key
        elif type(holder) in _CONTAINERS and not isinstance(holder, list) and isinstance(key, (str, int)):
            yield holder, key

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression, or an unknown object if it is in no table."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id == self._self:
            return self._owner
        if isinstance(node, ast.Name) and self._imported.get(node.id, (None, ""))[1] is None:
            return self._imported[node.id][0]
        if isinstance(node, ast.Call):
            is_type = isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
            held = self._value(node.args[0]) if is_type else _UNKNOWN
            return _UNKNOWN if held is _UNKNOWN else type(held)
        if isinstance(node, ast.Attribute):
            holder = self._value(node.value)
            if node.attr == "__class__" and holder is not _UNKNOWN:
                return type(holder)
            if holder is self._owner and holder is not None and node.attr in table_of(holder):
                return table_of(holder)[node.attr]
        held = next((OuterRead(*place, node, frozenset(), False).value for place in self._places(node)), _UNKNOWN)
        return _UNKNOWN if held is UNSET else held

    def _is_own_module(self, module: ModuleType) -> bool:
        file = table_of(module).get("__file__")
        return isinstance(file, str) and self._is_own(file)

    def _is_own_class(self, cls: type) -> bool:
        module = sys.modules.get(cls.__module__)
        return module is not None and self._is_own_module(module) and not issubclass(cls, Enum)


_PLACES: dict[type, Callable[[_Reader, Any], Iterator[tuple[Any, Any]]]] = {
    ast.Name: _Reader.of_name,
    ast.Attribute: _Reader.of_attribute,
    ast.Subscript: _Reader.of_subscript,
    ast.Compare: _Reader.of_comparison,
    ast.Call: _Reader.of_call,
}


def _variables_inside(code: CodeType) -> Iterator[str]:
    """Yield the variables of the functions that a function defines."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from (*constant.co_varnames, *_variables_inside(constant))


def _imports(tree: ast.AST) -> Iterator[tuple[str, tuple[Any, str | None]]]:
    """Yield the variables that a function imports, each with a loaded Python module, and a name in it or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                loaded = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or loaded, (sys.modules.get(loaded, _UNKNOWN), None)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                inner = sys.modules.get(f"{node.module}.{alias.name}")
                outer = sys.modules.get(node.module or "", _UNKNOWN)
                yield alias.asname or alias.name, (outer, alias.name) if inner is None else (inner, None)


def _root(node: ast.AST) -> str | None:
    while not isinstance(node, ast.Name):
        inner = getattr(node, "value", None) or getattr(node, "func", None)
        if not isinstance(inner, ast.expr):
            return None
        node = inner
    return node.id


def _names(node: ast.AST) -> frozenset[str]:
    inner = list(ast.walk(node))
    attributes = {n.attr for n in inner if isinstance(n, ast.Attribute)}
    keys = {n.value for n in inner if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return frozenset(attributes | keys | {n.id for n in inner if isinstance(n, ast.Name)})
