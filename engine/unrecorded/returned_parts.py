"""Results that code which did not run returns in another container: ``return (h, pooled) + outputs[1:]``.

Older classes of transformers return a tuple in place of an object with the same items if a flag says so. The code that
calls them picks the same items from either.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.flow.branches import RESULT
from engine.flow.choices import is_plain_class
from engine.flow.effects import names_read_only_by
from engine.limits import MOST_COMBINED_ITEMS
from engine.source.bindings import bindings, expressions_behind
from engine.source.syntax import compares_with_none, nodes_of
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["asks_about_result", "returned_alike"]


class _Contents(NamedTuple):
    """What a variable held in a recording.

    Attributes:
        values: indices of the values, alone or in containers.
        in_order: whether they are in the order of the items, as in containers of nothing but tensors.
    """

    values: tuple[int, ...]
    in_order: bool = True


class _Parts(NamedTuple):
    """The parts of a tuple or list that code builds.

    Attributes:
        contents: of each part, what it may hold.
        syntax: the expressions that build it.
    """

    contents: Sequence[frozenset[_Contents]] = ()
    syntax: Sequence[ast.AST] = ()


def returned_alike(branch: UntakenBranch) -> frozenset[str]:
    """Return the variables that a branch does nothing with but return them, in the order of the usual result.

    Args:
        branch: code that did not run.

    Returns:
        Their names, and `RESULT`; none if the branch returns anything else, or other items.
    """
    returns = [node for node in branch.branch.syntax if isinstance(node, ast.Return)]
    usual = _contents(RESULT, branch) if returns else None
    if not usual or not _is_usually_container(usual, branch):
        return frozenset()
    parts = [_parts(node.value, branch) for node in returns]
    syntax = [inner for own in parts if own is not None for node in own.syntax for inner in ast.walk(node)]
    if not all(own is not None and _are_alike(own, usual) for own in parts):
        return frozenset()
    return frozenset(names_read_only_by(branch.branch.syntax, syntax)) | {RESULT}


def asks_about_result(branch: UntakenBranch, other: UntakenBranch) -> bool:
    """Whether a condition reads what the usual result holds, other than to compare it with None.

    It may ask for the type of the container: ``isinstance(outputs, tuple)``, ``hasattr(outputs, "hidden_states")``.

    Args:
        branch: code that did not run, and that returns the usual items in another container.
        other: code whose condition may ask.
    """
    result = _values(RESULT, branch)
    behind = [part for test in other.tests() for part in expressions_behind(test, other.tree, other.self_name)]
    comparisons = (c for part in behind for c in nodes_of(part, ast.Compare) if compares_with_none(c))
    compared = {node for comparison in comparisons for node in ast.walk(comparison)}
    names = {node.id for part in behind for node in nodes_of(part, ast.Name) if node not in compared}
    return any(not result.isdisjoint(_values(name, other)) for name in names)


def _values(name: str, branch: UntakenBranch) -> set[int]:
    observed = branch.seen.get(name, ())
    return {value.index for kind, values in observed if kind in ("values", "inside") for value in values}


def _contents(name: str, branch: UntakenBranch) -> frozenset[_Contents] | None:
    """Return what a variable held; None if that cannot be told, or if the branch assigns something else to it."""
    observed = () if name in branch.branch.assigned else branch.seen.get(name, ())
    if not observed or not {kind for kind, _ in observed} <= {"values", "inside", "none", "other"}:
        return None
    features = [(kind, values if kind in ("values", "inside") else ()) for kind, values in observed]
    return frozenset(_Contents(tuple(value.index for value in own), kind != "inside") for kind, own in features)


def _is_usually_container(usual: Collection[_Contents], branch: UntakenBranch) -> bool:
    returned = [n.value for n in nodes_of(branch.tree, ast.Return) if branch.ran(n)]
    return all(len(held.values) > 1 for held in usual) or all(_creates_container(value, branch) for value in returned)


def _creates_container(value: ast.expr | None, branch: UntakenBranch) -> bool:
    """Whether an expression is a display, or creates an object that is no tensor: ``Output(last_hidden_state=h)``."""
    match value:
        case ast.Tuple() | ast.List():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return is_plain_class(branch.space.get(name))
    return False


def _parts(expr: ast.expr | None, branch: UntakenBranch) -> _Parts | None:
    """Return the parts of a tuple or list that an expression builds; None for any other expression."""
    match expr:
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return _of_items(items, expr, branch)
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[ast.GeneratorExp() | ast.ListComp() as comprehension]):
            return _of_items(_optional_items(comprehension), expr, branch)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _with(_parts(body if _is_there(test, branch) else orelse, branch), expr)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sum(_parts(left, branch) or _of_container(left, branch), _appended(right, branch), expr)
        case ast.Name(id=name):
            own = bindings(branch.tree, branch.self_name).get(name, ())
            if len(own) == 1 and own[0].replaces and own[0].node in branch.branch.syntax:
                return None if isinstance(own[0].value, ast.Name) else _with(_parts(own[0].value, branch), expr)
    return None


def _with(parts: _Parts | None, expr: ast.expr) -> _Parts | None:
    return None if parts is None else parts._replace(syntax=(*parts.syntax, expr))


def _sum(first: _Parts | None, second: _Parts | None, expr: ast.expr) -> _Parts | None:
    if first is None or second is None:
        return None
    return _Parts((*first.contents, *second.contents), (*first.syntax, *second.syntax, expr))


def _of_items(items: Sequence[ast.expr] | None, expr: ast.expr, branch: UntakenBranch) -> _Parts | None:
    """Return the variables in a display as its parts; None if it contains anything else."""
    contents = [_contents(item.id, branch) if isinstance(item, ast.Name) else None for item in items or ()]
    plain = [held for held in contents if held is not None]
    return _Parts(plain, (expr,)) if contents and len(plain) == len(contents) else None


def _optional_items(comprehension: ast.GeneratorExp | ast.ListComp) -> Sequence[ast.expr] | None:
    """Return the items of a display of which those that are not None are taken, as they are."""
    match comprehension:
        case (
            ast.GeneratorExp(elt=ast.Name(id=name), generators=[loop])
            | ast.ListComp(elt=ast.Name(id=name), generators=[loop])
        ):
            test = loop.ifs[0] if len(loop.ifs) == 1 else None
            is_plain = isinstance(loop.target, ast.Name) and loop.target.id == name == _asked_for(test)
            return loop.iter.elts if is_plain and isinstance(loop.iter, (ast.List, ast.Tuple)) else None
    return None


def _asked_for(test: ast.expr | None) -> str | None:
    """Return the variable of which a condition asks whether it is not None."""
    match test:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return name
    return None


def _is_there(test: ast.expr, branch: UntakenBranch) -> bool:
    """Whether a condition asks whether a variable is not None, which held features in all recordings."""
    name = _asked_for(test)
    contents = None if name is None else _contents(name, branch)
    return bool(contents) and all(held.values for held in contents or ())


def _of_container(expr: ast.expr, branch: UntakenBranch) -> _Parts | None:
    """Return a variable as a part, of which code that ran has read an attribute that no tensor has."""
    if not isinstance(expr, ast.Name):
        return None
    reads = (n for n in nodes_of(branch.tree, ast.Attribute) if getattr(n.value, "id", None) == expr.id)
    return _appended(expr, branch) if any(not hasattr(Tensor, r.attr) and branch.ran(r) for r in reads) else None


def _appended(expr: ast.expr, branch: UntakenBranch) -> _Parts | None:
    """Return what is appended to a tuple: a container, or ``outputs[1:]``, where code that ran picks ``outputs[0]``."""
    match expr:
        case ast.Name(id=name):
            contents = _contents(name, branch)
        case ast.Subscript(
            value=ast.Name(id=name), slice=ast.Slice(lower=ast.Constant(value=1), upper=None, step=None)
        ):
            contents = _contents(name, branch)
            firsts = frozenset(_Contents(held.values[:1]) for held in contents or ())
            if not any(_contents(first, branch) == firsts for first in _names_of_first(name, branch)):
                return None
            contents = frozenset(held._replace(values=held.values[1:]) for held in contents or ())
        case _:
            return None
    return None if contents is None else _Parts((contents,), (expr,))


def _names_of_first(name: str, branch: UntakenBranch) -> Iterator[str]:
    """Yield the variables to which code that ran assigns the first item of a container."""
    for node in nodes_of(branch.tree, ast.Assign):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=first)], value=ast.Subscript(value=ast.Name(id=other), slice=ast.Constant(value=0))
            ) if other == name and branch.ran(node):
                yield first


def _are_alike(parts: _Parts, usual: Collection[_Contents]) -> bool:
    """Whether every usual result holds what the parts held in a recording, and the parts held nothing else.

    A recording whose result has nothing but tensors shows the order.
    """
    if math.prod(map(len, parts.contents)) > MOST_COMBINED_ITEMS or not any(held.in_order for held in usual):
        return False
    sums = set(itertools.product(*parts.contents))
    in_parts = {index for contents in parts.contents for held in contents for index in held.values}
    in_usual = {index for held in usual for index in held.values}
    return in_parts <= in_usual and all(any(_is_sum(held, own) for own in sums) for held in usual)


def _is_sum(whole: _Contents, parts: Sequence[_Contents]) -> bool:
    values = tuple(index for part in parts for index in part.values)
    if whole.in_order and all(part.in_order for part in parts):
        return whole.values == values
    return set(whole.values) == set(values)
