"""What statements do to the tensors in their variables, judging by their text."""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Effect", "Functions", "effects", "names_read"]


class Effect(enum.IntEnum):
    """What code may do to what a variable holds; the greater includes the less."""

    KEEPS = 0
    KEEPS_ZERO = 1
    CHANGES = 2
    USES = 3


@dataclass(frozen=True)
class Functions:
    """What functions and methods of torch do, by the names that code calls them by.

    Attributes:
        keeps: they give back the entries of the tensor, in another dtype or another place.
        keeps_zero: they change single entries, and a zero stays one.
        changes: they change single entries.
        sizing: they take the sizes of their result.
        selecting: they take entries by an index along a dimension.
        spreading: those whose index has all dimensions, or broadcasts.
        filling: ops that create a tensor of one number, and read no more than a shape.
        contracted: tells of the call of an op what it contracts with a weight, and along which dimension.
    """

    keeps: frozenset[str]
    keeps_zero: frozenset[str]
    changes: frozenset[str]
    sizing: frozenset[str]
    selecting: frozenset[str]
    spreading: frozenset[str]
    filling: frozenset[str]
    contracted: Callable[[Any], tuple[Any, int] | None] = lambda node: None

    def level(self, name: str) -> Effect | None:
        """Return what a function does to the entries; None where that is not known."""
        if name in self.keeps:
            return Effect.KEEPS
        return Effect.KEEPS_ZERO if name in self.keeps_zero else Effect.CHANGES if name in self.changes else None


_DESCRIBES = frozenset(
    "dtype device requires_grad is_cuda is_cpu is_mps is_meta is_sparse is_nested is_quantized is_floating_point "
    "layout itemsize ndim dim shape size numel training".split()
)
_CHECKS = frozenset(
    "isinf isnan isfinite is_tensor is_floating_point isinstance hasattr finfo type len id is_grad_enabled".split()
)
_NAMESPACES = frozenset("torch F nn functional math".split())


def effects(nodes: Sequence[ast.AST], functions: Functions, foreign: Collection[str] = ()) -> dict[str, Effect]:
    """Return what statements do to what each variable holds, by name; what is not listed is used.

    Only assignments of a variable's own new entries (``x = x * 2``) are told apart from other uses, and what an object
    of the caller's gives back in its place (``k, v = cache.update(k, v)``), which is the same as far as anybody knows.

    Args:
        nodes: the statements.
        functions: of which it is known what they do.
        foreign: variables that hold an object of the caller's.

    Example:
        >>> functions = Functions(*([frozenset()] * 7))
        >>> effects(ast.parse("x = F.dropout(x, p); y = y + bias; z = layer(x)").body, functions)["y"].name
        'CHANGES'
    """
    result: dict[str, Effect] = {}
    for node in nodes:
        own = _statement(node, functions) or _exchanged(node, foreign)
        for name in set(names_read(node)):
            result[name] = max(result.get(name, Effect.KEEPS), own.get(name, Effect.USES))
    return result


def _statement(node: ast.AST, functions: Functions) -> dict[str, Effect]:
    """Return what a statement does to a variable that it gives new entries of its own."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name, expr = node.targets[0].id, node.value
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        name, expr = node.target.id, ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
    else:
        return {}
    effect = _effect(expr, name, functions)
    return {} if effect is None else {name: effect}


def _exchanged(node: ast.AST, foreign: Collection[str]) -> dict[str, Effect]:
    """Return the variables that an object of the caller's takes and gives back."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or len(node.targets) != 1:
        return {}
    function = node.value.func
    if not isinstance(function, ast.Attribute) or _root(function) not in foreign:
        return {}
    back = {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)}
    passed = {a.id for a in (*node.value.args, *(k.value for k in node.value.keywords)) if isinstance(a, ast.Name)}
    return dict.fromkeys(back & passed, Effect.KEEPS)


def _effect(expr: ast.expr, name: str, functions: Functions) -> Effect | None:
    """Return what an expression does to a variable's entries; None where it is not a tensor of such entries."""
    if isinstance(expr, ast.Name):
        return Effect.KEEPS if expr.id == name else None
    if isinstance(expr, ast.BinOp):
        left, right = _effect(expr.left, name, functions), _effect(expr.right, name, functions)
        own, other = (left, expr.right) if left is not None else (right, expr.left)
        if own is None or _mentions(other, name):
            return None
        if isinstance(expr.op, ast.Mult) or (isinstance(expr.op, ast.Div) and left is not None):
            return max(own, Effect.KEEPS_ZERO)
        return max(own, Effect.CHANGES) if isinstance(expr.op, (ast.Add, ast.Sub)) else None
    if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.USub):
        inner = _effect(expr.operand, name, functions)
        return None if inner is None else max(inner, Effect.KEEPS_ZERO)
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
        return _call(expr, expr.func, name, functions)
    return None


def _call(expr: ast.Call, function: ast.Attribute, name: str, functions: Functions) -> Effect | None:
    level = functions.level(function.attr)
    if function.attr.rstrip("_") == "clamp" and _symmetric(expr):
        level = Effect.KEEPS_ZERO
    plain = _root(function.value) in _NAMESPACES
    own = (expr.args[0] if expr.args else None) if plain else function.value
    rest = [*(expr.args[1:] if plain else expr.args), *(k.value for k in expr.keywords)]
    inner = None if own is None else _effect(own, name, functions)
    if level is None or inner is None or any(_mentions(part, name) for part in rest):
        return None
    return max(inner, level)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _symmetric(call: ast.Call) -> bool:
    """Whether a clamp's limits are a number and its negative."""
    limits = {k.arg: k.value for k in call.keywords}
    low, high = limits.get("min"), limits.get("max")
    negated = isinstance(low, ast.UnaryOp) and isinstance(low.op, ast.USub)
    return negated and high is not None and ast.dump(low.operand) == ast.dump(high)  # type: ignore[union-attr]


def _mentions(node: ast.AST, name: str) -> bool:
    return name in names_read(node)


def names_read(node: ast.AST) -> Iterator[str]:
    """Yield the variables whose entries are read: not for a dtype, a shape, for being None, or for being finite.

    Example:
        >>> list(names_read(ast.parse("y = x.to(w.dtype) if z is not None else b")))
        ['x', 'b']
    """
    if isinstance(node, ast.Name):
        yield from [node.id] if isinstance(node.ctx, ast.Load) else []
    elif isinstance(node, ast.AugAssign):
        yield from (n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
        yield from names_read(node.value)
    elif not _describes(node):
        for child in ast.iter_child_nodes(node):
            yield from names_read(child)


def _describes(node: ast.AST) -> bool:
    """Whether syntax says something of a variable that does not follow its entries."""
    if isinstance(node, ast.Attribute):
        return node.attr in _DESCRIBES and isinstance(node.value, (ast.Name, ast.Attribute))
    if isinstance(node, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in _CHECKS
    return False
