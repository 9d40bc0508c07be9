"""Effects of statements on the tensors that their variables hold, as far as the source code tells."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

__all__ = [
    "Effect",
    "Functions",
    "effect_on",
    "effects",
    "names_read",
    "names_read_only_by",
    "nodes_read",
    "operands",
]


class Effect(enum.IntEnum):
    """An effect of code on the contents of a variable; each includes the smaller ones, but CHANGES not MOVES.

    MOVES is that of code that keeps zeros, and may fill in, drop or average positions (`Functions.moves`).
    """

    KEEPS = 0
    KEEPS_ZERO = 1
    MOVES = 2
    CHANGES = 3
    USES = 4

    def and_then(self, other: Effect) -> Effect:
        """Return the effect of code with both effects.

        Example:
            >>> Effect.KEEPS.and_then(Effect.MOVES).name, Effect.CHANGES.and_then(Effect.MOVES).name
            ('MOVES', 'USES')
        """
        return Effect.USES if {self, other} == {Effect.MOVES, Effect.CHANGES} else max(self, other)


_METADATA = frozenset(
    "dtype device requires_grad is_cuda is_cpu is_mps is_meta is_sparse is_nested is_quantized is_floating_point "
    "layout itemsize ndim dim shape size numel training".split()
)
_METADATA_BUILTINS = frozenset("hasattr id isinstance len type".split())
_METADATA_FUNCTIONS = frozenset("is_tensor is_floating_point finfo is_grad_enabled".split())
_FINITE, _OF_ALL = re.compile("is(inf|nan|finite)"), re.compile("any|all")
_NAMESPACES = frozenset("torch F TF nn functional math".split())
_LIBRARIES = frozenset([*_NAMESPACES, "np", "numpy"])
_OF_PACKAGES = frozenset("torch torchvision math".split())


@dataclass(frozen=True)
class Functions:
    """Effects of torch's functions and methods on the entries of a tensor, by name.

    Attributes:
        keeps: functions that return the same entries, in another dtype or order.
        keeps_zero: elementwise functions that map zero to zero.
        changes: other elementwise functions.
        sizing: functions whose arguments are the sizes of the result.
        selecting: functions that take entries by an index along a dimension.
        spreading: those of them whose index has all dimensions, or broadcasts.
        filling: ops that create a uniform tensor, and read at most the shape of an input.
        aligned: ops that keep the shape of a tensor, and each entry in its channel.
        copying: functions that return a copy of a tensor.
        contracted: returns the value that an op contracts with a weight, and over which dimension, or None.
        moving: ops that keep the first two dimensions of a tensor if their sizes stay the same.
        moves: whether a call of a plain function pads with zeros, cuts or resizes at most the dimensions from the third
            on of a tensor with four or more.
        broadcasting: other functions that combine all their arguments entry by entry.
        reducing: methods that return a single number if they have no arguments.
        neutral_flags: names of flags with which ops combine the same channels, whether they are set or not.
        namespaces: names of the Python modules that hold these functions.
    """

    keeps: frozenset[str]
    keeps_zero: frozenset[str]
    changes: frozenset[str]
    sizing: frozenset[str]
    selecting: frozenset[str]
    spreading: frozenset[str]
    filling: frozenset[str]
    aligned: frozenset[str] = frozenset()
    copying: frozenset[str] = frozenset()
    contracted: Callable[[Any], tuple[Any, int] | None] = lambda node: None
    moving: frozenset[str] = frozenset()
    moves: Callable[[ast.Call], bool] = lambda call: False
    broadcasting: frozenset[str] = frozenset()
    reducing: frozenset[str] = frozenset()
    neutral_flags: frozenset[str] = frozenset()
    namespaces: frozenset[str] = _NAMESPACES

    def within(self, space: Mapping[str, Any], code: CodeType) -> Functions:
        """Return the functions as the code of a function may call them: under names of torch's own Python modules.

        Args:
            space: the global names of the code.
            code: of the function, whose variables may have such names as well.

        Example:
            >>> space = {"F": __import__("math"), "nn": ast}
            >>> sorted(Functions(*([frozenset()] * 7)).within(space, (lambda: 0).__code__).namespaces)
            ['F']
        """
        variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        held = {name: space.get(name) for name in self.namespaces - variables}
        packages = {name: item.__name__.partition(".")[0] for name, item in held.items() if inspect.ismodule(item)}
        return replace(self, namespaces=frozenset(name for name, own in packages.items() if own in _OF_PACKAGES))

    def of_call(self, name: str) -> Effect | None:
        """Return the effect of a function on the entries of a tensor; None if it is unknown."""
        if name in self.keeps:
            return Effect.KEEPS
        return Effect.KEEPS_ZERO if name in self.keeps_zero else Effect.CHANGES if name in self.changes else None


def effects(
    nodes: Sequence[ast.AST], functions: Functions, foreign: Collection[str] = (), returned: str | None = None
) -> dict[str, Effect]:
    """Return the effect of statements on the contents of each variable that they read.

    An assignment that recomputes a variable (``x = x * 2``) has the effect of its functions. A variable that a caller's
    object takes and returns (``k, v = cache.update(k, v)``) counts as unchanged. Everything else is a use.

    Args:
        nodes: the statements.
        functions: known effects of functions.
        foreign: variables that hold an object of the caller.
        returned: the variable that the function returns unless the statements return: returning ``x.to(dtype)`` in
            place of ``x`` counts as recomputing ``x``.

    Example:
        >>> functions = Functions(*([frozenset()] * 7))
        >>> effects(ast.parse("x = F.dropout(x, p); y = y + bias; z = layer(x)").body, functions)["y"].name
        'CHANGES'
    """
    result: dict[str, Effect] = {}
    for node in nodes:
        own = _assignment_effect(node, functions, returned) or _round_trips(node, foreign)
        for name in set(names_read(node)):
            result[name] = result.get(name, Effect.KEEPS).and_then(own.get(name, Effect.USES))
    return result


def _assignment_effect(node: ast.AST, functions: Functions, returned: str | None) -> dict[str, Effect]:
    """Return the effect of an assignment, or of a return, that recomputes a variable."""
    name, expr = _recomputed(node, returned)
    effect = None if expr is None else effect_on(expr, name, functions)
    return {} if effect is None else {name: effect}


def _recomputed(node: ast.AST, returned: str | None) -> tuple[str, ast.expr | None]:
    """Return the variable that a statement sets, and the expression that computes it."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id, ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
    if isinstance(node, ast.Return) and node.value is not None and returned is not None:
        return returned, node.value
    return "", None


def operands(
    nodes: Iterable[ast.AST], variable: str, functions: Functions, returned: str | None = None
) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what statements combine a variable with, entry by entry, and whether they add it.

    Args:
        nodes, functions, returned: as for `effects`.
        variable: the variable, which the statements recompute.

    Example:
        >>> functions = Functions(*([frozenset()] * 7))
        >>> nodes = ast.parse("x = (x + a) * b; y = y * c").body
        >>> [(ast.unparse(operand), adds) for operand, adds in operands(nodes, "x", functions)]
        [('b', False), ('a', True)]
    """
    for node in nodes:
        name, expr = _recomputed(node, returned)
        if expr is not None and name == variable and effect_on(expr, name, functions) is not None:
            yield from _combined_with(expr, name, functions)


def _combined_with(expr: ast.expr, name: str, functions: Functions) -> Iterator[tuple[ast.expr, bool]]:
    parts: list[ast.expr] = []
    if isinstance(expr, ast.BinOp):
        parts = [expr.left, expr.right]
    elif isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
        own = [] if _root(expr.func.value) in functions.namespaces else [expr.func.value]
        parts = [*own, *expr.args, *(k.value for k in expr.keywords)]
        if functions.of_call(expr.func.attr) in (None, Effect.KEEPS):  # a dtype, or sizes
            parts = [part for part in parts if _mentions(part, name)]
    elif isinstance(expr, (ast.UnaryOp, ast.Subscript)):
        parts = [expr.operand if isinstance(expr, ast.UnaryOp) else expr.value]
    for part in parts:
        if not _mentions(part, name):
            yield part, isinstance(expr, ast.BinOp) and isinstance(expr.op, (ast.Add, ast.Sub))
    for part in parts:
        if _mentions(part, name):
            yield from _combined_with(part, name, functions)


def _round_trips(node: ast.AST, foreign: Collection[str]) -> dict[str, Effect]:
    """Return the variables that a method of a caller's object takes and returns."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or len(node.targets) != 1:
        return {}
    function = node.value.func
    if not isinstance(function, ast.Attribute) or _root(function) not in foreign:
        return {}
    returned = {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)}
    passed = {a.id for a in (*node.value.args, *(k.value for k in node.value.keywords)) if isinstance(a, ast.Name)}
    return dict.fromkeys(returned & passed, Effect.KEEPS)


def effect_on(expr: ast.expr, name: str, functions: Functions) -> Effect | None:
    """Return the effect of an expression on the entries of a variable; None if it is not a tensor of such entries.

    Args:
        expr: the expression.
        name: the variable.
        functions: known effects of functions.

    Example:
        >>> functions = Functions(*([frozenset()] * 7))
        >>> effect_on(ast.parse("x * 2", mode="eval").body, "x", functions).name
        'KEEPS_ZERO'
    """
    if isinstance(expr, ast.Name):
        return Effect.KEEPS if expr.id == name else None
    if isinstance(expr, ast.BinOp):
        left, right = effect_on(expr.left, name, functions), effect_on(expr.right, name, functions)
        own, other = (left, expr.right) if left is not None else (right, expr.left)
        if own is None or _mentions(other, name):
            return None
        if isinstance(expr.op, ast.Mult) or (isinstance(expr.op, ast.Div) and left is not None):
            return own.and_then(Effect.KEEPS_ZERO)
        return own.and_then(Effect.CHANGES) if isinstance(expr.op, (ast.Add, ast.Sub)) else None
    if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.USub):
        inner = effect_on(expr.operand, name, functions)
        return None if inner is None else inner.and_then(Effect.KEEPS_ZERO)
    if isinstance(expr, ast.Subscript) and _is_cut(expr.slice) and not _mentions(expr.slice, name):
        inner = effect_on(expr.value, name, functions)
        return None if inner is None else inner.and_then(Effect.MOVES)
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
        return _call_effect(expr, expr.func, name, functions)
    return None


def _is_cut(index: ast.expr) -> bool:
    """Whether an index takes a part of the last dimensions of a picture, and all of the first two.

    Example:
        >>> texts = ("x[:, :, :h, :w]", "x[..., a:b]", "x[:, c:]", "x[:, :, 0]", "x[..., :c, :h, :w]", "x[:]")
        >>> [_is_cut(ast.parse(text, mode="eval").body.slice) for text in texts]
        [True, True, False, False, False, False]
    """
    match index:
        case ast.Tuple(elts=[ast.Constant(value=value), *rest]) if value is ...:
            return 0 < len(rest) <= 2 and all(isinstance(part, ast.Slice) for part in rest)
        case ast.Tuple(elts=[ast.Slice(None, None, None), ast.Slice(None, None, None), *rest]):
            return all(isinstance(part, ast.Slice) for part in rest)
    return False


def _call_effect(expr: ast.Call, function: ast.Attribute, name: str, functions: Functions) -> Effect | None:
    level = functions.of_call(function.attr)
    if function.attr.rstrip("_") == "clamp" and _is_symmetric_clamp(expr):
        level = Effect.KEEPS_ZERO
    plain = _root(function.value) in functions.namespaces
    if plain and functions.moves(expr):
        level = Effect.MOVES
    own = (expr.args[0] if expr.args else None) if plain else function.value
    rest = [*(expr.args[1:] if plain else expr.args), *(k.value for k in expr.keywords)]
    inner = None if own is None else effect_on(own, name, functions)
    if level is None or inner is None or any(_mentions(part, name) for part in rest):
        return None
    return inner.and_then(level)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_symmetric_clamp(call: ast.Call) -> bool:
    """Whether the limits of a clamp are a number and its negative."""
    limits = {k.arg: k.value for k in call.keywords}
    low, high = limits.get("min"), limits.get("max")
    negated = isinstance(low, ast.UnaryOp) and isinstance(low.op, ast.USub)
    return negated and high is not None and ast.dump(low.operand) == ast.dump(high)  # type: ignore[union-attr]


def _mentions(node: ast.AST, name: str) -> bool:
    return name in names_read(node)


def names_read(node: ast.AST) -> Iterator[str]:
    """Yield the variables whose entries are read; reading a dtype or a shape, or testing for None, does not count.

    Example:
        >>> list(names_read(ast.parse("y = x.to(w.dtype) if z is not None else b")))
        ['x', 'b']
    """
    if isinstance(node, ast.Name):
        yield from [node.id] if isinstance(node.ctx, ast.Load) else []
    elif isinstance(node, ast.AugAssign):
        yield from (n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
        yield from names_read(node.value)
    elif not _reads_metadata(node):
        for child in ast.iter_child_nodes(node):
            yield from names_read(child)


def names_read_only_by(syntax: Iterable[ast.AST], reads: Iterable[ast.AST]) -> set[str]:
    """Return the variables that code reads at certain places and nowhere else.

    Args:
        syntax: all syntax nodes of the code.
        reads: the nodes that may read them.

    Example:
        >>> call, other = ast.parse("f(x)", mode="eval").body, ast.parse("g(x, y)", mode="eval").body
        >>> names_read_only_by(ast.walk(call), call.args), names_read_only_by(ast.walk(other), other.args[1:])
        ({'x'}, {'y'})
    """
    allowed = set(map(id, reads))
    loads = [n for n in syntax if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return {n.id for n in loads} - {n.id for n in loads if id(n) not in allowed}


def nodes_read(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes inside a node, except those of which only metadata is read.

    Args:
        node: a statement or an expression.

    Example:
        >>> node = ast.parse("a.b + c.d.dtype", mode="eval").body
        >>> [inner.id for inner in nodes_read(node) if isinstance(inner, ast.Name)]
        ['a']
    """
    if not _reads_metadata(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from nodes_read(child)


def _reads_metadata(node: ast.AST) -> bool:
    """Whether an expression reads metadata of a variable, which does not depend on its entries."""
    if isinstance(node, ast.Attribute):
        return node.attr in _METADATA and isinstance(node.value, (ast.Name, ast.Attribute))
    if isinstance(node, ast.Compare):
        assigns = any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))
        return not assigns and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
    if isinstance(node, ast.Call):
        return _calls_for_metadata(node)
    return False


def _calls_for_metadata(call: ast.Call) -> bool:
    """Whether a call asks for a type or a length, or whether any number is infinite.

    Example:
        >>> texts = "len(x)", "x.type()", "x.isnan().any()", "x.type(dtype)", "self.len(x)", "x.isnan()"
        >>> [_calls_for_metadata(ast.parse(text, mode="eval").body) for text in texts]
        [True, True, True, False, False, False]
    """
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in _METADATA_BUILTINS | _METADATA_FUNCTIONS
    if not isinstance(function, ast.Attribute):
        return False
    plain, has_arguments = _root(function.value) in _LIBRARIES, bool(call.args or call.keywords)
    if _OF_ALL.fullmatch(function.attr):
        asked = call.args[0] if plain and len(call.args) == 1 else function.value if not has_arguments else None
        return isinstance(asked, ast.Call) and _is_finite_call(asked)
    if _FINITE.fullmatch(function.attr):
        return _root(function.value) == "math"
    return not has_arguments if function.attr == "type" else function.attr in _METADATA_FUNCTIONS and plain


def _is_finite_call(call: ast.Call) -> bool:
    """Whether a call asks which entries are infinite: ``x.isinf()`` or ``torch.isinf(x)``."""
    if not isinstance(call.func, ast.Attribute) or not _FINITE.fullmatch(call.func.attr):
        return False
    return len(call.args) == int(_root(call.func.value) in _LIBRARIES) and not call.keywords
