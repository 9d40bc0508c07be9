"""What code reads of an object by attributes and indices alone: ``cache.layers[self.index].keys``."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.source.branches import Branch

__all__ = ["PartsRead", "parts_read"]

_MISSING = object()


class _UnclearError(Exception):
    """Raised where reading something runs code."""


class PartsRead:
    """Parts of an object, which stand for it.

    Args:
        items: the parts.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items


def parts_read(thing: Any, name: str, branch: Branch, variables: Mapping[str, Any]) -> Any:
    """Return the parts of an object that a branch would read, or the object where that cannot be told.

    No code of the object's class runs. A part that is not there is none: the branch would raise an error.

    Args:
        thing: what a variable holds, no tensor and no container.
        name: of the variable.
        branch: a part of a function.
        variables: all of the function's, by name.
    """
    paths = _paths(branch).get(name)
    if not paths:
        return thing
    try:
        parts = [_value_at(path, variables) for path in paths]
    except _UnclearError:
        return thing
    return PartsRead([part for part in parts if part is not _MISSING])


@functools.cache
def _paths(branch: Branch) -> Mapping[str, tuple[ast.expr, ...] | None]:
    """Return the attributes and items that are read of each variable; None where it is read as it is, or changed."""
    around = {child: node for node in branch.syntax for child in ast.iter_child_nodes(node)}
    paths: dict[str, tuple[ast.expr, ...] | None] = {}
    for root in (node for node in branch.syntax if isinstance(node, ast.Name)):
        path: ast.expr = root
        while isinstance(outer := around.get(path), (ast.Attribute, ast.Subscript)) and outer.value is path:
            path = outer
        if isinstance(outer, ast.Call) and outer.func is path and isinstance(path, ast.Attribute):
            path = path.value  # a method of it
        before = paths.get(root.id, ())
        is_read = path is not root and isinstance(getattr(path, "ctx", None), ast.Load)
        paths[root.id] = (*before, path) if is_read and before is not None else None
    return paths


def _value_at(path: ast.expr, variables: Mapping[str, Any]) -> Any:
    if isinstance(path, ast.Constant):
        return path.value
    if isinstance(path, ast.Name):
        return variables.get(path.id, _MISSING)
    if isinstance(path, ast.UnaryOp) and isinstance(path.op, ast.USub) and isinstance(path.operand, ast.Constant):
        return -path.operand.value  # type: ignore[operator]
    if isinstance(path, ast.Attribute):
        owner = _value_at(path.value, variables)
        return owner if owner is _MISSING or isinstance(owner, Tensor) else _attribute(owner, path.attr)
    if isinstance(path, ast.Subscript):
        owner = _value_at(path.value, variables)
        if owner is _MISSING or isinstance(owner, Tensor):
            return owner
        index = _value_at(path.slice, variables)
        return _MISSING if index is _MISSING else _item(owner, index)
    raise _UnclearError


def _attribute(owner: Any, name: str) -> Any:
    held = inspect.getattr_static(owner, name, _MISSING)
    if isinstance(held, types.MemberDescriptorType):  # a slot
        try:
            return held.__get__(owner, type(owner))
        except AttributeError:
            return _MISSING
    if held is _MISSING and not hasattr(type(owner), "__getattr__"):
        return _MISSING
    if held is _MISSING or getattr(owner, "__dict__", {}).get(name, _MISSING) is not held:
        raise _UnclearError
    return held


def _item(owner: Any, index: Any) -> Any:
    if type(owner) not in (list, tuple, dict) or not isinstance(index, (int, str)):
        raise _UnclearError
    try:
        return owner[index]
    except (IndexError, KeyError, TypeError):
        return _MISSING
