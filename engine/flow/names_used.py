"""Names that code uses whenever it runs: attributes of its module, and globals."""

from __future__ import annotations

import ast
import functools
from types import CodeType

from engine.flow.control_flow import always_run
from engine.source.function_text import syntax_of_file, text_of

__all__ = ["attributes_used", "globals_used", "names_in"]


@functools.cache
def attributes_used(nodes: tuple[ast.AST, ...], self_name: str) -> tuple[str, ...]:
    """Return the attributes of the module that code always calls, indexes, or takes an attribute of.

    Args:
        nodes: statements or expressions.
        self_name: the variable that is the module.
    """
    names: list[str] = []
    for node in always_run(nodes):
        used = node.func if isinstance(node, ast.Call) else getattr(node, "value", None)
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)) and isinstance(used, ast.Attribute):
            if isinstance(used.value, ast.Name) and used.value.id == self_name:
                names.append(used.attr)
    return tuple(names)


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function, and in the functions and comprehensions inside of it.

    Example:
        >>> sorted(names_in((lambda x: [item.width for item in x.items if item.size > LARGEST]).__code__))
        ['LARGEST', 'items', 'size', 'width']
    """
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


@functools.cache
def globals_used(nodes: tuple[ast.AST, ...], code: CodeType) -> tuple[str, ...]:
    """Return the global names that code always reads, and that its function does not bind itself."""
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    bound_later = _globals_bound_by_functions(text_of(code))
    names = (n.id for n in always_run(nodes) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return tuple(name for name in names if name in code.co_names and not {name, _ANY} & (own | bound_later))


_ANY = "*"
"""Stands for all names, if code looks up global names in a table."""


@functools.lru_cache(maxsize=64)
def _globals_bound_by_functions(text: str) -> frozenset[str]:
    """Return the names that functions of a file declare as global, and may bind when they run."""
    try:
        tree = syntax_of_file(text)
    except SyntaxError:
        return frozenset({_ANY})
    nodes = list(ast.walk(tree))
    names = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    tables = {node.id for node in nodes if isinstance(node, ast.Name)} & {"globals", "setattr", "exec"}
    return frozenset(names | ({_ANY} if tables else set()))
