"""Results that code which did not run returns in another container: ``return (h, pooled) + outputs[1:]``.

Older classes of transformers return a tuple in place of an object with the same items if a flag says so. The code that
calls them picks the same items from either.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from engine.flow.branches import RESULT
from engine.flow.choices import is_plain_class
from engine.flow.effects import names_read, names_read_only_by
from engine.program.graph import Value
from engine.source.bindings import bindings
from engine.source.syntax import nodes_of
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["returned_alike"]

_Contents = frozenset[tuple[int, ...]]
"""Values of a variable, once per recording."""
_Observed = tuple[str, Any]
"""What a variable held in one recording: a kind, and the values."""


class _Sequence(NamedTuple):
    """Items that code puts in a tuple or list, and what else it appends; with the syntax that says so."""

    items: tuple[ast.expr, ...]
    rest: tuple[ast.expr, ...]
    syntax: tuple[ast.AST, ...]


def returned_alike(branch: UntakenBranch, stored: Mapping[str, Value]) -> frozenset[str]:
    """Return the variables that a branch does nothing with but return them, in the order of the usual result.

    Args:
        branch: code that did not run.
        stored: values of the parameters and buffers that were read, by name.

    Returns:
        Their names, and `RESULT`; none if the branch returns anything else, or other items.
    """
    returns = [node for node in branch.branch.syntax if isinstance(node, ast.Return)]
    usual = _usual_results(branch)
    syntax: list[ast.AST] = []
    for node in returns:
        if _is_sum_of_containers(node.value, branch):
            syntax += ast.walk(node)
            continue
        sequences = _sequences(node.value, branch)
        if not usual or not sequences or not all(_is_alike(s, usual, branch, stored) for s in sequences):
            return frozenset()
        syntax += [inner for s in sequences for part in s.syntax for inner in ast.walk(part)]
    return frozenset(names_read_only_by(branch.branch.syntax, syntax)) | {RESULT} if syntax else frozenset()


def _is_sum_of_containers(value: ast.expr | None, branch: UntakenBranch) -> bool:
    """Whether two containers are appended to one another (``decoder + encoder``) whose items the usual result holds."""
    match value:
        case ast.BinOp(left=ast.Name(id=first), op=ast.Add(), right=ast.Name(id=second)):
            if not (_is_container(first, branch) and _is_container(second, branch)):
                return False
            pairs = [(a, b) for a in branch.seen.get(first, ()) for b in branch.seen.get(second, ())]
            return all(any(_is_sum(result, *pair) for pair in pairs) for result in branch.seen.get(RESULT, ()))
    return False


def _is_sum(result: _Observed, first: _Observed, second: _Observed) -> bool:
    """Whether a container holds what two others hold, in this order where all are containers of tensors alone."""
    whole = [value.index for value in result[1] or ()]
    parts = [value.index for _, values in (first, second) for value in values or ()]
    kinds = {kind for kind, _ in (result, first, second)}
    same = whole == parts if kinds == {"values"} else kinds <= {"values", "inside"} and set(whole) == set(parts)
    return same and bool(whole)


def _is_container(name: str, branch: UntakenBranch) -> bool:
    """Whether code that ran has read an attribute of a variable that no tensor has (``outputs.last_hidden_state``)."""
    reads = (n for n in nodes_of(branch.tree, ast.Attribute) if isinstance(n.value, ast.Name) and n.value.id == name)
    return any(not hasattr(Tensor, read.attr) and branch.ran(read) for read in reads)


def _usual_results(branch: UntakenBranch) -> _Contents:
    """Return what the containers held that the function returned; nothing if it may return anything else."""
    usual = _contents(RESULT, branch)
    returned = [n.value for n in nodes_of(branch.tree, ast.Return) if branch.ran(n)]
    is_container = all(len(items) > 1 for items in usual) or all(_creates_container(v, branch) for v in returned)
    return usual if is_container else frozenset()


def _creates_container(value: ast.expr | None, branch: UntakenBranch) -> bool:
    """Whether an expression is a display, or creates an object that is no tensor: ``Output(last_hidden_state=h)``."""
    match value:
        case ast.Tuple() | ast.List():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return is_plain_class(branch.space.get(name))
    return False


def _contents(name: str, branch: UntakenBranch) -> _Contents:
    """Return the values that a variable held, alone or in a container of tensors; nothing if it ever held others."""
    observed = branch.seen.get(name, ())
    is_plain = all(kind == "values" for kind, _ in observed)
    return frozenset(tuple(value.index for value in values) for _, values in observed) if is_plain else frozenset()


def _sequences(expr: ast.expr | None, branch: UntakenBranch) -> list[_Sequence]:
    """Return what a tuple or a list may contain that the branch builds; nothing for any other expression."""
    match expr:
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_Sequence(tuple(items), (), (expr,))]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return [
                s._replace(syntax=(*s.syntax, expr))
                for s in _sequences(body if _is_there(test, branch) else orelse, branch)
            ]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [_Sequence(s.items, (*s.rest, right), (*s.syntax, expr)) for s in _sequences(left, branch)]
        case ast.Name(id=name):
            own = bindings(branch.tree, branch.self_name).get(name, ())
            if not all(
                b.replaces and b.node in branch.branch.syntax and not isinstance(b.value, ast.Name) for b in own
            ):
                return []
            values = [_sequences(binding.value, branch) for binding in own]
            return [s for sequences in values for s in sequences] if all(values) else []
    return []


def _is_there(test: ast.expr, branch: UntakenBranch) -> bool:
    """Whether a condition asks whether a variable is not None, which held features in all recordings."""
    match test:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return bool(_contents(name, branch))
    return False


def _is_alike(sequence: _Sequence, usual: _Contents, branch: UntakenBranch, stored: Mapping[str, Value]) -> bool:
    """Whether a sequence begins with the items of every usual result, and goes on with its further items, if any."""
    length = len(sequence.items)
    if any(len(items) < length for items in usual) or not all(isinstance(item, ast.Name) for item in sequence.items):
        return False
    for position, item in enumerate(sequence.items):
        if _contents(item.id, branch) != {(items[position],) for items in usual}:  # type: ignore[attr-defined]
            return False
    tails = frozenset(items[length:] for items in usual) - {()}
    if len(sequence.rest) == 1 and _further_items(sequence.rest[0], branch) == tails:
        return True
    names = {name for part in sequence.rest for name in names_read(part)}
    return not tails and not any(branch.values_of(n, stored) or branch.holds_unread(n, stored) for n in names)


def _further_items(part: ast.expr, branch: UntakenBranch) -> _Contents | None:
    """Return the values in ``outputs[1:]``, where code that ran has picked ``outputs[0]``; None for anything else."""
    match part:
        case ast.Subscript(
            value=ast.Name(id=name), slice=ast.Slice(lower=ast.Constant(value=1), upper=None, step=None)
        ):
            contents = _contents(name, branch)
            firsts = [
                n.targets[0] for n in nodes_of(branch.tree, ast.Assign) if branch.ran(n) and _is_first(n.value, name)
            ]
            names = {first.id for first in firsts if isinstance(first, ast.Name)}
            if any(_contents(first, branch) == frozenset(items[:1] for items in contents) for first in names):
                return frozenset(items[1:] for items in contents) - {()}
    return None


def _is_first(value: ast.expr, name: str) -> bool:
    match value:
        case ast.Subscript(value=ast.Name(id=other), slice=ast.Constant(value=0)):
            return other == name
    return False
