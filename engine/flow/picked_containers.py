"""Variables from which a function picks items by computed numbers or names, and their contents there."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, cast

from engine.flow.control_flow import NESTED
from engine.source.bindings import bindings
from engine.source.syntax import nodes_of, parents_of

__all__ = [
    "PICKING_METHODS",
    "container_of",
    "containers_by_line",
    "counted_variables",
    "lengthening_values",
    "note_contents",
]

PICKING_METHODS = frozenset({"get", "pop"})

_HARMLESS = frozenset({"abs", "bool", "float", "int", "len", "max", "min", "round", "str"})
_LATER = (*NESTED, ast.GeneratorExp)
"""Code that may run later than its line."""


def container_of(pick: ast.AST, tree: ast.AST) -> str | None:
    """Return the variable from which a subscript or a call picks, if its contents are those at the start of the line.

    Args:
        pick: the subscript or the call.
        tree: of the function.

    Example:
        >>> tree = ast.parse("a = x[k]\\nb = x.get(k)\\nc = self.x[k]\\nx = {}; d = x[k]\\ne = lambda: x[k]")
        >>> picks = nodes_of(tree, ast.Subscript, ast.Call)
        >>> {ast.unparse(parents_of(tree)[pick]): container_of(pick, tree) for pick in picks}
        {'a = x[k]': 'x', 'b = x.get(k)': 'x', 'c = self.x[k]': None, 'd = x[k]': None, 'lambda: x[k]': None}
    """
    match pick:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Load()):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in PICKING_METHODS:
            pass
        case _:
            return None
    parents, around = parents_of(tree), cast(ast.AST, pick)
    while around in parents:
        around = parents[around]
        if isinstance(around, _LATER) and around is not tree:
            return None
    lines = range(pick.lineno, (pick.end_lineno or pick.lineno) + 1)
    if any(call.lineno in lines and _may_fill(call, pick) for call in nodes_of(tree, ast.Call)):
        return None
    for other in nodes_of(tree, ast.Name):
        if other.id == name and other.lineno in lines:
            user = parents[other]
            is_method = isinstance(user, ast.Attribute) and user.attr in PICKING_METHODS
            if not (is_method or isinstance(user, ast.Subscript) and user.value is other and _only_reads(user)):
                return None
    return name


def _may_fill(call: ast.Call, pick: ast.AST) -> bool:
    """Whether a call on the lines of a pick may run before it and change the container, under another name.

    Whatever receives the item runs after the pick, and Python functions that compute numbers change nothing.
    """
    if call is pick or pick in nodes_of(call) or getattr(call.func, "id", "") in _HARMLESS:
        return False
    return not (isinstance(call.func, ast.Attribute) and call.func.attr in PICKING_METHODS)


def _only_reads(subscript: ast.Subscript) -> bool:
    return isinstance(subscript.ctx, ast.Load)


@functools.cache
def containers_by_line(tree: ast.AST) -> Mapping[int, frozenset[str]]:
    """Return the variables from which code picks by computed values, by the lines of the picks.

    Example:
        >>> dict(containers_by_line(ast.parse("a = x[0]\\nb = x[\\n  k]")))
        {2: frozenset({'x'}), 3: frozenset({'x'})}
    """
    lines: dict[int, frozenset[str]] = {}
    for pick in nodes_of(tree, ast.Subscript, ast.Call):
        index = pick.slice if isinstance(pick, ast.Subscript) else next(iter(pick.args), None)
        is_computed = index is not None and not isinstance(index, (ast.Constant, ast.Tuple))
        if is_computed and (name := container_of(pick, tree)) is not None:
            for line in range(pick.lineno, (pick.end_lineno or pick.lineno) + 1):
                lines[line] = lines.get(line, frozenset()) | {name}
    return lines


def note_contents(
    contents: dict[tuple[int, str], list[Any]], frame: FrameType, names: Iterable[str], summarize: Callable[[Any], Any]
) -> None:
    """Note the contents of variables at the start of a line, if they are new.

    Args:
        contents: is extended, by line and variable.
        frame: of the function.
        names: of the variables.
        summarize: returns what to keep of a value; None stands for unknown contents.
    """
    for name in names:
        noted = contents.setdefault((frame.f_lineno, name), [])
        if None not in noted and (summary := summarize(frame.f_locals.get(name))) not in noted:
            noted.append(summary)


def counted_variables(expr: ast.expr) -> set[str]:
    """Return the variables of which an expression reads the length alone.

    Example:
        >>> counted_variables(ast.parse("len(a) - len(b) + b[0]", mode="eval").body)
        {'a'}
    """
    names = [node.id for node in nodes_of(expr, ast.Name)]
    calls = (call for call in nodes_of(expr, ast.Call) if getattr(call.func, "id", "") == "len")
    counted = [call.args[0].id for call in calls if call.args and isinstance(call.args[0], ast.Name)]
    return {name for name in counted if counted.count(name) == names.count(name)}


def lengthening_values(name: str, tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that may determine the length of a variable: not what is an item of a list.

    Example:
        >>> text = "def f(a):\\n  b = [x.size(0) for x in a if x]\\n  b[1] = b[0].size(0)\\n  b.append(a[0])"
        >>> [ast.unparse(value) for value in lengthening_values("b", ast.parse(text).body[0])]
        ['a', 'x', 'a[0]']
    """
    bound = bindings(tree).get(name, ())
    whole = [b for b in bound if b.replaces and _is_target(name, b.node)]
    lists = [b for b in whole if isinstance(b.value, (ast.List, ast.ListComp))]
    for binding in bound:
        value = binding.value
        if binding in lists and isinstance(value, ast.ListComp):
            yield from (part for g in value.generators for part in (g.iter, *g.ifs))
        elif binding in lists and isinstance(value, ast.List):
            yield from (item.value for item in value.elts if isinstance(item, ast.Starred))
        elif len(lists) < len(whole) or not lists or not _is_item(binding.node):
            yield value


def _is_target(name: str, node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    is_assignment = isinstance(node, (ast.Assign, ast.AnnAssign))
    return is_assignment and [getattr(target, "id", "") for target in targets] == [name]


def _is_item(node: ast.AST) -> bool:
    """Whether a statement replaces one item of a list."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    items = [target for target in targets if isinstance(target, ast.Subscript)]
    return items == targets and not any(isinstance(item.slice, (ast.Slice, ast.Tuple)) for item in items)
