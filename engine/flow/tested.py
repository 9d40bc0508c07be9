"""The variables and attributes on which a condition depends, directly or through methods that it calls."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from engine.source.bindings import bindings, expressions_behind, path_of
from engine.source.callees import attribute_of
from engine.source.function_text import syntax_of
from engine.source.static_attributes import method_code

__all__ = ["ANY", "attributes_tested", "variables_tested"]

ANY = "*"
"""The path of an attribute with a computed name, and the first part of the path from an unknown object."""


_PLAIN = (str, list, tuple, dict, set, int, float, range)


def variables_tested(tests: Collection[ast.expr], tree: ast.AST) -> set[str]:
    """Return the variables in expressions, and those from which these are computed.

    Args:
        tests: the expressions.
        tree: syntax of the function that they are in.
    """
    parts = (part for test in tests for part in expressions_behind(test, tree))
    return {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}


def attributes_tested(
    tests: Collection[ast.expr], tree: ast.AST, self_name: str | None, module: nn.Module
) -> Iterator[str]:
    """Yield the paths of attributes from which expressions, or the variables in them, are computed.

    Numbers that modules hold are omitted if they are reached through a variable other than the module, because
    comparisons with them are recorded.

    Args:
        tests: the expressions.
        tree: syntax of the function that they are in.
        self_name: the variable that is the module; None in a plain function.
        module: the module whose method the function is.

    Returns:
        Paths from the module (``gate.mode``); those from an unknown object start with ``*``.

    Example:
        >>> tree = ast.parse("mode = self.mode\\nif wide(x) and mode == 'full' and getattr(self, key): pass")
        >>> sorted(set(attributes_tested([tree.body[1].test], tree, "self", nn.Identity())))
        ['*', 'mode']
    """
    waiting: list[tuple[ast.AST, ast.AST, str | None]]
    waiting = [(node, tree, self_name) for test in tests for node in expressions_behind(test, tree)]
    seen: set[ast.AST] = set()
    while waiting:
        part, function, owner = waiting.pop()
        called = {id(node.func) for node in ast.walk(part) if isinstance(node, ast.Call)}
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                yield from _path(node, id(node) in called, function, owner, module)
            elif isinstance(node, ast.Call):
                yield from _looked_up(node, owner)
                more = [(inner, function, owner) for inner in _inner_functions(node, function)]
                more += [(method, method, method.args.args[0].arg) for method in _methods(node, owner, module)]
                waiting += [job for job in more if job[0] not in seen]
                seen.update(job[0] for job in more)


def _path(
    node: ast.Attribute, is_called: bool, function: ast.AST, self_name: str | None, module: nn.Module
) -> Iterator[str]:
    root, _, path = (path_of(node) or "").partition(".")
    if root and root == self_name:
        yield from _own_path(path, is_called, module)
    elif root and root not in _local_names(function):  # a global, or a variable of an enclosing function
        return
    elif is_called:
        if not any(hasattr(kind, node.attr) for kind in (torch.Tensor, *_PLAIN)):
            yield ANY  # what a method of an unknown object returns
    elif not _is_of_tensors(node.attr) and not any(_holds_number(m, node.attr) for m in module.modules()):
        yield f"{ANY}.{node.attr}"


def _own_path(path: str, is_called: bool, module: nn.Module) -> Iterator[str]:
    """Yield the path of an attribute of the module; the path of a method that is not followed ends in ``()``."""
    held: Any = module
    for name in path.split(".") if is_called else ():
        held = inspect.getattr_static(held, name, None) if not isinstance(held, nn.Module) else attribute_of(held, name)
    is_followed = not is_called or isinstance(held, nn.Module) or method_code(module, path) is not None
    yield path if is_followed else f"{path}()"


@functools.cache
def _local_names(function: ast.AST) -> frozenset[str]:
    """Return the arguments and the variables of a function."""
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return frozenset(arguments | bindings(function).keys())


def _is_of_tensors(name: str) -> bool:
    """Whether tensors have such an attribute, other than a method (``shape``, ``ndim``, ``device``)."""
    return hasattr(torch.Tensor, name) and not callable(getattr(torch.Tensor, name))


def _holds_number(module: nn.Module, name: str) -> bool:
    held = vars(module).get(name)
    return isinstance(held, (int, float)) and not isinstance(held, bool)


def _looked_up(call: ast.Call, self_name: str | None) -> Iterator[str]:
    """Yield the attribute that a call of ``getattr`` looks up."""
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1:
        owner, name = call.args[:2]
        is_own = isinstance(owner, ast.Name) and owner.id == self_name
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            yield ANY
        else:
            yield name.value if is_own else f"{ANY}.{name.value}"


def _inner_functions(call: ast.Call, function: ast.AST) -> list[ast.FunctionDef]:
    """Return the inner functions that a call in a function may run."""
    name = call.func.id if isinstance(call.func, ast.Name) else None
    return [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n.name == name and n is not function]


def _methods(call: ast.Call, self_name: str | None, module: nn.Module) -> list[ast.FunctionDef]:
    """Return the method of the module that is called, if it has arguments."""
    root, _, name = (path_of(call.func) or "").partition(".")
    function = method_code(module, name) if name and root == self_name else None
    tree = None if function is None else syntax_of(function.__code__)
    return [tree] if isinstance(tree, ast.FunctionDef) and tree.args.args else []
