"""Numbers in the source of a function: their positions, and the function recompiled with other numbers.

``qkv.reshape(b, n, 3, self.heads, c // self.heads)`` cannot follow when heads are removed and ``c`` stays. Just that
argument is replaced by its new number, in the syntax tree of the function that makes the call.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

from engine.errors import PlanError
from engine.source.function_text import keep_text, source_of
from engine.source.sites import Site
from engine.surgery.classes import compiled, legible, namespace
from engine.surgery.moments import average_squares, divide_total, spread_out
from engine.surgery.operands import Bounds, Sides, Tail

__all__ = [
    "CENTRED",
    "DIVISOR",
    "MEAN",
    "SCALE",
    "SPREAD",
    "STATISTICS",
    "Pin",
    "edited",
    "original",
    "place_of",
    "rebuilt",
    "source_hash",
]

# Where the sizes stand in the call, without the tensor: the position of the first, or of the tuple that holds them.
_SIZES_AT = {"view": 0, "reshape": 0, "expand": 0, "unflatten": 1, "split": 0, "mul": 0, "div": 0}

DIVISOR = "divisor"
"""The demand for the number of channels over which a mean runs, which is not an argument.

Its position is 0 if the channels are all that the mean reduces, and otherwise their dimension, plus one where that is
not negative.
"""
CENTRED = "centred"
"""The same for a mean of squares behind a subtraction of what is the same for all channels."""
SPREAD = "spread"
"""The same for a variance or a standard deviation."""
SCALE = ("scale", 0)
"""The demand for what attention multiplies its scores by, which is an argument that most leave out."""
MEAN, _SCALE, _PART = "mean", "scale", "Subscript"
STATISTICS = frozenset({MEAN, CENTRED, SPREAD})
"""The operators whose value is the number of channels that a statistic spans."""

Place = ast.Call | ast.BinOp | ast.Subscript
"""Where a number stands: a call, an operator, the bounds of a slice."""

_BOUNDS = ("start", "end")

# Operators between a tensor and a number, by the torch function that carries them out.
_OPERATORS = {"mul": "Mult", "div": "Div", "__rdiv__": "Div"}
_KINDS = ("", *STATISTICS, _SCALE, _PART, *_OPERATORS.values())


@dataclass(frozen=True)
class Pin:
    """One argument of one call.

    Attributes:
        module: name of the module in whose forward the call is made.
        function: name of the method, or of the function of the module's file, that makes the call.
        method: name of the method that makes the call, or that calls the function.
        source: hash of the function's source, so that a plan is only applied to the code it was made for.
        line, column: end of the call, relative to the function's first line.
        operator: name of the operator's syntax node; empty for a call; ``mean`` for a call whose result is divided;
            ``centred`` and ``spread`` for other statistics that span removed channels; ``scale`` for a call whose
            scale is passed by name; ``Subscript`` for a slice.
        position: which size argument of a call, which side of an operator, or which bound of a slice; of a statistic,
            as `DIVISOR` has it.
        value: the new number.
    """

    module: str
    function: str
    method: str
    source: str
    line: int
    column: int
    operator: str
    position: int
    value: int | float

    def state_dict(self) -> dict[str, Any]:
        """Return the pin as primitives, without the module."""
        return {key: value for key, value in asdict(self).items() if key != "module"}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Pin:
        """Read what `state_dict` wrote."""
        fields: dict[str, Any] = {name: str(state[name]) for name in ("function", "method", "source", "operator")}
        fields |= {name: int(state[name]) for name in ("line", "column", "position")}
        value = state["value"]
        if not math.isfinite(value) or abs(value) >= 2**31 or fields["operator"] not in _KINDS:
            raise PlanError(f"A pin of {fields['function']!r} is damaged: {fields['operator']!r} {value!r}.")
        return cls("", **fields, value=float(value) if isinstance(value, float) else int(value))


def place_of(site: Site, argument: tuple[str, int], op: str) -> tuple[str, int] | None:
    """Return the operator and the position of a `Pin` for a number; None if it is an argument of an ordinary call.

    Args:
        site: the call or operator in the source.
        argument: name and position of the number.
        op: name of the op that receives it.
    """
    name, position = argument
    if name in (DIVISOR, CENTRED, SPREAD) and site.function == op:
        return MEAN if name == DIVISOR else name, position
    if argument == SCALE and site.function == op:
        return _SCALE, 0
    if site.function == "__getitem__" and argument[0] in _BOUNDS:
        return _PART, _BOUNDS.index(argument[0])
    if site.function in _OPERATORS:
        return _OPERATORS[site.function], 0 if site.reflected else 1
    return None


def original(function: FunctionType) -> FunctionType:
    """Return the function that the user wrote, if this is a copy with pinned arguments."""
    return getattr(function, "_unpinned", function)


def source_hash(function: FunctionType) -> str:
    """Return a hash of a function's source; empty if there is none."""
    source = source_of(function)
    return "" if source is None else hashlib.sha256(source.encode()).hexdigest()[:16]


@functools.cache
def _parsed(function: FunctionType) -> tuple[str, int] | None:
    """Return the dedented source of a function and its indentation; None if the running code is different."""
    source = source_of(function)
    if source is None:
        return None
    first = source.split("\n", 1)[0]
    return textwrap.dedent(source), len(first) - len(first.lstrip())


def edited(function: FunctionType, pins: Iterable[Pin], count: int = 0) -> ast.Module | None:
    """Return the syntax tree with the pinned arguments replaced; None if a call is not where it is expected.

    ``count``: as `_template` has it.
    """
    parsed = _parsed(function)
    if parsed is None or function.__closure__:
        return None
    try:
        tree = ast.parse(parsed[0])
    except SyntaxError:  # text that is less indented than the function it stands in
        return None
    if not isinstance(tree.body[0], ast.FunctionDef) or any(_is_private(node) for node in ast.walk(tree)):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, Place)]
    places = {(_kind(call), call.end_lineno, call.end_col_offset): call for call in calls}
    for pin in pins:
        kind = "" if pin.operator in _ON_CALLS else pin.operator
        call = places.get((kind, pin.line + 1, pin.column - parsed[1]))
        if call is None or count and not _one_by_one(call, count):
            return None
        if pin.operator in _ON_CALLS:
            del places[kind, pin.line + 1, pin.column - parsed[1]]  # what takes its place is not changed again
            assert isinstance(call, ast.Call)
            changed = _ON_CALLS[pin.operator](tree.body[0], call, pin.value, pin.position)
            if changed is None:
                return None
            _replace(tree, call, changed)
        elif not _set(call, pin):
            return None
    return ast.fix_missing_locations(tree)


def _replace(tree: ast.AST, old: ast.expr, new: ast.expr) -> None:
    """Put an expression in the place of another one, which it may contain."""
    ast.copy_location(new, old)
    for node in list(ast.walk(tree)):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
            elif isinstance(value, list):
                value[:] = [new if item is old else item for item in value]


def _one_by_one(call: Place, count: int) -> bool:
    """Whether the sizes of a call are written out one by one, rather than passed as one name."""
    sizes = _sizes(call)
    if not isinstance(sizes, Tail):
        return True
    return isinstance(call, ast.Call) and _name(call) not in ("split", "unflatten") and (count == 1 or len(sizes) > 1)


def _set(call: Place, pin: Pin) -> bool:
    """Replace a number; return whether that was possible."""
    sizes = _sizes(call)
    if sizes is None or pin.position >= len(sizes):
        return False
    if any(isinstance(argument, ast.Starred) for argument in sizes[: pin.position + 1]):
        return False
    sizes[pin.position] = ast.copy_location(ast.Constant(pin.value), sizes[pin.position])
    return True


def _rescale(function: ast.FunctionDef, call: ast.Call, scale: float, place: int) -> ast.expr | None:
    """Pass the scale by name in a call of attention; return None if that is not possible."""
    if any(keyword.arg is None for keyword in call.keywords) or len(call.args) > 6:
        return None
    others = [keyword for keyword in call.keywords if keyword.arg != "scale"]
    call.keywords = [*others, ast.copy_location(ast.keyword("scale", ast.Constant(scale)), call)]
    return call


_ON_CALLS: Mapping[str, Callable[[ast.FunctionDef, ast.Call, float, int], ast.expr | None]] = {
    MEAN: divide_total,
    CENTRED: average_squares,
    SPREAD: spread_out,
    _SCALE: _rescale,
}


def _kind(node: Place) -> str:
    """Return the operator's name, ``Subscript`` for a part of a tensor, or an empty string for a call.

    No two of one kind end at the same place: an operand that ends where its operator ends binds tighter and is of
    another kind.
    """
    return type(node.op).__name__ if isinstance(node, ast.BinOp) else _PART * isinstance(node, ast.Subscript)


def _is_private(node: ast.AST) -> bool:
    """Whether a name would be mangled inside a class; the rebuilt function is not in one."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def _sizes(call: Place) -> list[ast.expr] | None:
    """Return a list whose items can be set in the tree: sizes of a call, sides of an operator, or bounds of a slice."""
    if isinstance(call, ast.BinOp):
        return Sides(call)
    if isinstance(call, ast.Subscript):
        return Bounds.of(call)
    name = _name(call)
    if name not in _SIZES_AT:
        return None
    free = (
        not isinstance(call.func, ast.Attribute)
        or isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
    )
    start = _SIZES_AT[name] + (1 if free else 0)
    if start < len(call.args) and isinstance(call.args[start], (ast.Tuple, ast.List)):
        elements: list[ast.expr] = call.args[start].elts  # type: ignore[attr-defined]
        return elements
    return Tail(call.args, start)


def _name(call: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    name: str = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name


def rebuilt(function: FunctionType, pins: Iterable[Pin], names: Mapping[str, Any]) -> FunctionType:
    """Recompile a function with pinned arguments; it sees other functions under ``names``."""
    tree = edited(function, pins)
    if tree is None:
        raise PlanError(f"The source of {function.__qualname__} is not the one that the plan was made for.")
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    # decorators and defaults were evaluated where the function was defined; defaults are handed over below
    definition.decorator_list = []
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [d and ast.Constant(None) for d in definition.args.kw_defaults]
    ast.fix_missing_locations(tree)
    text = ast.unparse(definition)
    _indent(tree, _parsed(function)[1])  # type: ignore[index]
    space: dict[str, Any] = {}
    code = compiled(ast.increment_lineno(tree, function.__code__.co_firstlineno - 1), function.__code__.co_filename)
    label = f"{function.__qualname__}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    exec(code, namespace(function, label, names), space)  # the user's own source, a number replaced
    new_function: FunctionType = space[function.__name__]
    keep_text(new_function.__code__, tree)
    new_function.__defaults__, new_function.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new_function.__qualname__, new_function.__annotations__ = function.__qualname__, function.__annotations__
    new_function._unpinned = function  # type: ignore[attr-defined]
    new_function.__wrapped__ = legible(text, label, function)  # type: ignore[attr-defined]
    return new_function


def _indent(tree: ast.AST, columns: int) -> None:
    """Give nodes of dedented source their columns in the file, where later pins look for them."""
    for node in ast.walk(tree):
        if hasattr(node, "col_offset"):
            node.col_offset += columns
            node.end_col_offset += columns  # type: ignore[attr-defined]
