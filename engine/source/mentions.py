"""How a function uses attributes of its first argument: whether it calls them, tests them, or does something else."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from engine.source.function_text import syntax_of
from engine.source.syntax import parents_of

__all__ = ["Mention", "mentions"]

_TESTS = frozenset("bool callable hasattr id isinstance issubclass len type".split())
_CHILDREN = frozenset("_modules children modules named_children named_modules get_submodule".split())
_ITERATES = frozenset("enumerate getattr iter list map next reversed tuple vars zip".split())


@dataclass(frozen=True)
class Mention:
    """An attribute of the first argument, or of an attribute or an item of this, and so on, as far as code names it.

    Attributes:
        path: names of attributes, and literal indices and keys.
        node: the syntax.
        of_children: whether all children of the module at the path are meant.
        prefix: prefix of the names of these children, as far as a literal in the code shows.
        is_called: whether it is called.
        is_tested: whether only its type, its length or its presence matters.
    """

    path: tuple[Any, ...]
    node: ast.expr
    of_children: bool = False
    prefix: str = ""
    is_called: bool = False
    is_tested: bool = False


@functools.cache
def mentions(code: CodeType) -> tuple[Mention, ...]:
    """Return the attributes that a method mentions of the module that is its first argument.

    Args:
        code: of the method.

    Example:
        >>> def forward(self, x):
        ...     return self.layers[0](x) if self.norm is None else self.table.get(len(x))(x)
        >>> [(mention.path, mention.is_called, mention.is_tested) for mention in mentions(forward.__code__)]
        [(('layers', 0), True, False), (('norm',), False, True), (('table', 'get'), True, False)]
    """
    tree = syntax_of(code) if code.co_argcount else None
    return () if tree is None else tuple(_mentions(tree, code.co_varnames[0]))


def _mentions(tree: ast.AST, owner: str) -> Iterator[Mention]:
    parents = parents_of(tree)
    names = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == owner and isinstance(n.ctx, ast.Load))
    for name in sorted(names, key=lambda n: (n.lineno, n.col_offset)):
        path: list[Any] = []
        node: Any = name
        while (step := _step(node, parents[node])) is not None:
            path, node = [*path, step], parents[node]
        parent = parents[node]
        end = next((index for index, step in enumerate(path) if step in _CHILDREN), len(path))
        if end < len(path) or _is_iterated(node, parent):
            yield Mention(tuple(path[:end]), node, of_children=True, prefix=_prefix(parent))
        elif path and isinstance(getattr(node, "ctx", None), ast.Load):
            is_called = isinstance(parent, ast.Call) and parent.func is node
            yield Mention(tuple(path), node, is_called=is_called, is_tested=_is_tested(node, parent))


def _step(node: ast.expr, parent: ast.AST) -> Any:
    """Return the attribute, or the literal index or key, that code takes of a syntax node; None if it takes neither."""
    if isinstance(parent, ast.Attribute):
        return parent.attr
    if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant):
        return parent.slice.value
    return None


def _is_iterated(node: ast.expr, parent: ast.AST) -> bool:
    if isinstance(parent, (ast.For, ast.comprehension)):
        return parent.iter is node
    return isinstance(parent, ast.Call) and node in parent.args and getattr(parent.func, "id", "") in _ITERATES


def _is_tested(node: ast.expr, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Call):
        return node in parent.args and getattr(parent.func, "id", "") in _TESTS
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in parent.ops)
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, ast.Not)
    return getattr(parent, "test", None) is node or isinstance(parent, ast.BoolOp)


def _prefix(call: ast.AST) -> str:
    """Return the literal prefix of an attribute's name in a lookup such as ``getattr(self, f"head_{task}")``."""
    name = call.args[1] if isinstance(call, ast.Call) and len(call.args) > 1 else None
    first = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
