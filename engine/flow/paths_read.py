"""Parts of an object that code reads by attributes and indices alone: ``cache.layers[self.index].keys``."""

from __future__ import annotations

import ast
import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from engine.flow.branches import Branch
from engine.flow.measured import numbers_measured
from engine.flow.names_used import names_in
from engine.numbers.sizes import Scalar, Size, is_tagged
from engine.program.expressions import ShapeOf, leaves
from engine.source.sites import is_library
from engine.source.syntax import parents_of

__all__ = ["NumberRead", "PartsRead", "parts_read", "picks_by_literals", "state_read"]

_MISSING, _UNCLEAR = object(), object()
_NOTHING = (nn.Module, str, int, float, type(None))
"""Types of objects without tensors, or without any that matter here."""


class _UnclearError(Exception):
    """Raised if reading an attribute or an item would run code."""


class PartsRead:
    """Parts of an object, which stand for it.

    Args:
        items: the parts.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items


class NumberRead:
    """A number that was computed from sizes, and whose value code reads.

    Args:
        number: with its expression.

    Attributes:
        values: the tensors that have these sizes, other than the first of several, which is the batch size.
    """

    def __init__(self, number: Size | Scalar) -> None:
        sizes = [leaf for leaf in leaves(number.expr) if isinstance(leaf, ShapeOf)]
        self.values = tuple(leaf.value for leaf in sizes if leaf.dim > 0 or leaf.value.ndim == 1)


def parts_read(obj: Any, name: str, branch: Branch, variables: Mapping[str, Any]) -> Any:
    """Return the parts of an object that a branch would read, or the object if they cannot be determined.

    No code of the object's class runs. Missing parts are omitted, because the branch would raise an error.

    Args:
        obj: the value of a variable, other than a tensor or a container.
        name: of the variable.
        branch: a part of a function.
        variables: all of the function's, by name.
    """
    paths = _paths(branch).get(name)
    if not paths:
        return obj
    try:
        parts = [_value_at(path, variables) for path in paths]
    except _UnclearError:
        return obj
    return PartsRead([part for part in parts if part is not _MISSING])


def picks_by_literals(branch: Branch, name: str) -> bool:
    """Whether a branch reads items of a variable by literal indices alone, such as ``outputs[1]``."""
    steps = [_first_step(path) for path in _paths(branch).get(name) or ()]
    return bool(steps) and all(isinstance(step, ast.Subscript) and _is_literal(step.slice) for step in steps)


def _first_step(path: ast.expr) -> ast.expr:
    """Return what a path reads of its variable."""
    while isinstance(path, (ast.Attribute, ast.Subscript)) and not isinstance(path.value, ast.Name):
        path = path.value
    return path


def _is_literal(index: ast.expr) -> bool:
    index = index.operand if isinstance(index, ast.UnaryOp) else index
    return isinstance(index, ast.Constant) and type(index.value) is int


def state_read(branch: Branch, variables: Mapping[str, Any], space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of modules, globals and sizes that a branch would read, each with its text and a space.

    Values that a call stores there and removes before it ends are no outputs of the call. If an index is unknown, the
    whole container is read; a method or a property of a module reads all attributes that it names. A size that was read
    earlier, and that the branch uses as a divisor or in a power, has to stay, and so does a float that was computed
    from sizes.

    Args:
        branch: a part of a function.
        variables: of the function, by name.
        space: its globals.
    """
    for path, root in _state(branch):
        owner = variables.get(root, _MISSING)
        if isinstance(owner, nn.Module) or owner is _MISSING:
            yield from _state_at(path, variables if root in variables else space)
    for number in _numbers(branch):
        if is_tagged(held := _read(number, variables)):
            yield f"{ast.unparse(number)} ", NumberRead(held)
    for name in branch.names:
        if isinstance(held := variables.get(name), Scalar):
            yield f"{name} ", NumberRead(held)


def _state_at(path: ast.expr, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values at a path, or at the longest part of it that can be resolved."""
    while (held := _read(path, variables)) is _UNCLEAR:
        if not isinstance(path, (ast.Attribute, ast.Subscript)):
            return
        owner = _read(path.value, variables)
        if isinstance(owner, nn.Module) and isinstance(path, ast.Attribute):
            for name in _attributes_behind(type(owner), path.attr) & vars(owner).keys():  # type: ignore[arg-type]
                if not isinstance(vars(owner)[name], _NOTHING):
                    yield f"{ast.unparse(path.value)}.{name} ", vars(owner)[name]
            return
        path = path.value
    if not isinstance(held, _NOTHING):
        yield f"{ast.unparse(path)} ", held


def _read(path: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value at a path; None if there is none."""
    try:
        held = _value_at(path, variables)
    except _UnclearError:
        return _UNCLEAR
    return None if held is _MISSING else held


@functools.cache
def _attributes_behind(kind: Any, name: str) -> frozenset[str]:
    """Return the attributes that a method or a property of a class of modules names, also through other methods."""
    names, waiting = set[str](), [name]
    while waiting:
        member = inspect.getattr_static(kind, waiting.pop(), None)
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, types.FunctionType) and not is_library(function.__code__.co_filename):
            new = names_in(function.__code__) - names
            names |= new
            waiting += new
    return frozenset(names)


@functools.cache
def _numbers(branch: Branch) -> tuple[ast.expr, ...]:
    return tuple(number for node in branch.nodes for number in numbers_measured(node))


@functools.cache
def _state(branch: Branch) -> tuple[tuple[ast.expr, str], ...]:
    """Return the longest paths to attributes and items, and globals, each with the variable that it begins at."""
    paths = {}
    for root in (node for node in branch.syntax if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
        path = _path_from(root, branch)
        if not (path is root and _is_called(path, branch)):
            paths[ast.dump(path)] = path, root.id
    return tuple(paths.values())


def _path_from(root: ast.expr, branch: Branch) -> ast.expr:
    """Return the longest path of attributes and items that starts at a variable."""
    path, around = root, parents_of(*branch.nodes)
    while isinstance(outer := around.get(path), (ast.Attribute, ast.Subscript)) and outer.value is path:
        path = outer
    return path


def _is_called(path: ast.expr, branch: Branch) -> bool:
    call = parents_of(*branch.nodes).get(path)
    return isinstance(call, ast.Call) and call.func is path


@functools.cache
def _paths(branch: Branch) -> Mapping[str, tuple[ast.expr, ...] | None]:
    """Return the attributes and items read of each variable; None if the variable itself is read or changed."""
    paths: dict[str, tuple[ast.expr, ...] | None] = {}
    for root in (node for node in branch.syntax if isinstance(node, ast.Name)):
        path = _path_from(root, branch)
        if isinstance(path, ast.Attribute) and _is_called(path, branch):  # a method of what is read
            path = path.value
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
    if isinstance(owner, nn.Module) and name in owner._modules:
        return owner._modules[name]
    if isinstance(owner, threading.local):
        return owner.__dict__.get(name, _MISSING)
    held = inspect.getattr_static(owner, name, _MISSING)
    if isinstance(held, types.MemberDescriptorType):  # a slot
        try:
            return held.__get__(owner, type(owner))
        except AttributeError:
            return _MISSING
    if held is _MISSING and not hasattr(type(owner), "__getattr__"):
        return _MISSING
    if held is _MISSING or _own(owner).get(name, _MISSING) is not held:
        raise _UnclearError
    return held


def _own(owner: Any) -> Mapping[str, Any]:
    """Return the attributes stored in an object, bypassing its class."""
    try:
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def _item(owner: Any, index: Any) -> Any:
    if type(owner) not in (list, tuple, dict) or not isinstance(index, (int, str)):
        raise _UnclearError
    try:
        return owner[index]
    except (IndexError, KeyError, TypeError):
        return _MISSING
