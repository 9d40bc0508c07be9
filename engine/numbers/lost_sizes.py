"""Sizes from which a plain number in a call is computed after Python or another package has dropped the expression.

``0.5 * x.shape[1]`` is a plain number: a ``float`` on the left multiplies an ``int`` by itself, whatever its class. So
are ``np.sqrt(x.shape[1])``, ``x.stride(0)`` and ``float(f"{n}")``. With fewer channels, such a number would be
different.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, GetSetDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.numbers.literals import literals_at, without
from engine.numbers.replaced_functions import TRACKED_FUNCTIONS
from engine.numbers.sizes import is_tagged
from engine.source.bindings import arguments_of, places_set
from engine.source.expressions_at import expression_at, is_literal, operands_of
from engine.source.function_text import syntax_of
from engine.source.passed_arguments import function_of, home, passed_argument
from engine.source.syntax import nodes_of

__all__ = ["lost_sizes"]

_LOST = frozenset(
    "dim_order element_size is_contiguous itemsize nbytes storage storage_offset stride untyped_storage".split()
)
"""Methods and attributes that return plain numbers which follow from the sizes of a tensor."""

_READS = _LOST | frozenset("nelement numel shape size __len__".split())
"""Methods and attributes that return its sizes, or numbers computed from them."""

_DESCRIPTIONS = frozenset("device dtype grad_fn layout name names ndim output_nr requires_grad retains_grad".split())
"""Attributes of tensors that are neither tensors nor sizes."""

_WITHOUT_TENSORS = frozenset("can_cast is_complex is_conj is_floating_point is_neg is_same_size is_tensor".split())
"""Functions of torch that return no tensor, beside those."""

_DROPPING = frozenset("bytes complex divmod float format int pow str".split())
"""Functions of Python that return plain numbers, or texts of them."""

_PACKAGES = frozenset("decimal fractions np numpy operator statistics".split())
"""Names of packages whose functions do."""

_OF_MATH = TRACKED_FUNCTIONS | {function.__name__ for function in (math.ceil, math.floor, math.prod)}
"""Functions of `math` that keep expressions."""

_KEEPING = (abs, max, min, round, sum, tuple, list, range, reversed, zip, enumerate, sorted, dict)
"""Functions of Python that return their argument, or compute with its own operators."""

_UNKNOWN = object()


def lost_sizes(
    numbers: Sequence[Any], frame: FrameType, tag: Callable[[Tensor, torch.Size], Sequence[int]]
) -> list[Any]:
    """Return the tracked numbers from which the plain numbers in a call may be computed.

    Args:
        numbers: the plain numbers that a function or an operator receives.
        frame: the frame that makes the call.
        tag: returns the tracked sizes of a tensor.
    """
    plain = without(numbers, literals_at(frame.f_code, frame.f_lasti))
    if not plain:
        return []
    search = _Search()
    operands = operands_of(expression_at(frame.f_code, frame.f_lasti))
    computed = [e for e in operands if not is_literal(e) and not _is_tracked(e, frame)]
    certain = [operand for operand in computed if _is_number(operand, frame)]
    computed = computed if len(certain) < len(plain) else certain  # what a method returns is then no number
    reads = [read for operand in computed for read in search.of(operand, frame, lost=False)]
    sizes = (s for r in reads for s in ([r] if is_tagged(r) else [tag(r[0], r[0].size())[dim] for dim in r[1]]))
    return [size for size in sizes if is_tagged(size)]


def _is_number(expr: ast.AST, frame: FrameType) -> bool:
    """Whether an expression is certainly a number: operators on numbers, variables and sizes."""
    if isinstance(expr, ast.BinOp):
        return _is_number(expr.left, frame) and _is_number(expr.right, frame)
    if isinstance(expr, ast.UnaryOp):
        return _is_number(expr.operand, frame)
    held = expr.value if isinstance(expr, ast.Constant) else _held(expr, frame)
    return isinstance(held, (int, float)) or _dimensions(expr, frame) is not None


def _is_tracked(operand: ast.expr, frame: FrameType) -> bool:
    """Whether an operand is text or a tracked number: a size, or a number computed from sizes by operators."""
    if isinstance(operand, ast.UnaryOp):
        return _is_tracked(operand.operand, frame)
    if isinstance(operand, ast.BinOp):
        is_whole = type(getattr(operand.left, "value", None)) is int or type(_held(operand.left, frame)) is int
        return _is_tracked(operand.left, frame) or is_whole and _is_tracked(operand.right, frame)
    is_size = _dimensions(operand, frame) is not None
    return is_size or isinstance(operand, ast.JoinedStr) or is_tagged(_held(operand, frame))


class _Search:
    """The variables that have been followed.

    A size keeps its expression in Python's own code, up to where something drops it: an operator with a float on its
    left, a text, or a function that is not written in Python. What is read below such a place is lost.
    """

    def __init__(self) -> None:
        self._followed: set[tuple[int, str, bool]] = set()

    def of(self, expr: ast.AST, frame: FrameType, lost: bool) -> Iterator[Any]:
        """Yield the sizes that an expression reads on the way to a plain number.

        Args:
            expr: the expression.
            frame: whose variables it reads.
            lost: whether the surrounding code drops the expressions of numbers.
        """
        read = _dimensions(expr, frame)
        if read is not None:
            yield from [read] if lost else []
        elif isinstance(expr, ast.BinOp) and _is_tensor(expr, frame):  # the numbers in it were looked at by themselves
            return
        elif isinstance(expr, ast.Name):
            yield from self._variable(expr.id, frame, lost)
        elif isinstance(expr, ast.Call):
            yield from self._call(expr, frame, lost)
        elif isinstance(expr, ast.Attribute):
            yield from self._attribute(expr, frame, lost)
        elif isinstance(expr, ast.IfExp):
            for side in (expr.body, expr.orelse):
                yield from self.of(side, frame, lost)
        elif isinstance(expr, ast.BinOp):
            yield from self.of(expr.left, frame, lost)
            drops = _is_float(expr.left, frame) and not _is_concatenation(expr, frame)
            yield from self.of(expr.right, frame, lost or drops)
        elif not isinstance(expr, ast.Compare) and not _is_tensor(expr, frame):  # a comparison is noted by itself
            for part in ast.iter_child_nodes(expr):
                yield from self.of(part, frame, lost or isinstance(expr, ast.JoinedStr))

    def _attribute(self, expr: ast.Attribute, frame: FrameType, lost: bool) -> Iterator[Any]:
        whole, held = _held(expr.value, frame), _held(expr, frame)
        lost_here = lost or expr.attr in _LOST
        if isinstance(whole, Tensor):
            yield from [(whole, range(whole.ndim))] if expr.attr in _READS and lost_here else []
        elif is_tagged(held):
            yield from [held] if lost else []
        elif whole is _UNKNOWN and expr.attr in _READS and _is_tensor(expr.value, frame):  # of a view
            tensors = (_held(part, frame) for part in ast.walk(expr.value)) if lost_here else ()
            yield from ((tensor, range(tensor.ndim)) for tensor in tensors if isinstance(tensor, Tensor))
        elif whole is _UNKNOWN:
            yield from self.of(expr.value, frame, lost)

    def _call(self, call: ast.Call, frame: FrameType, lost: bool) -> Iterator[Any]:
        """Yield the sizes that a call reads: by name, or those that another function may read of its arguments."""
        function = _held(call.func, frame)
        if _is_tensor(call, frame) or function is len and _is_counted(call.args[0], frame):
            return
        lost = lost or not _reads_sizes(call.func) and _drops_expressions(function)
        if isinstance(call.func, ast.Attribute):
            yield from self._attribute(call.func, frame, lost)
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            held = _held(argument, frame)
            if isinstance(held, Tensor):
                yield from [(held, range(held.ndim))] if lost else []
            else:
                yield from self.of(argument, frame, lost)

    def _variable(self, name: str, frame: FrameType, lost: bool) -> Iterator[Any]:
        frame = home(name, frame)
        held, function = frame.f_locals.get(name), function_of(frame)
        if is_tagged(held) and lost:
            yield held
        if not _may_be_computed(held) or function is None or (id(frame), name, lost) in self._followed:
            return
        self._followed.add((id(frame), name, lost))
        for statement in nodes_of(function, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            if name in names and statement.value is not None:
                on_the_left = isinstance(statement, ast.AugAssign) and isinstance(held, float)
                yield from self.of(statement.value, frame, lost or on_the_left)
        if name in arguments_of(function) and not places_set(function, name):
            passed = passed_argument(name, frame)
            if passed is not None and passed.expression is not None:
                yield from self.of(passed.expression, passed.frame, lost)


def _is_float(expr: ast.expr, frame: FrameType) -> bool:
    """Whether an expression may be a float, or another number, that drops the expression of a size on its right."""
    if _is_tracked(expr, frame):
        return False
    if isinstance(expr, ast.UnaryOp):
        return _is_float(expr.operand, frame)
    if isinstance(expr, ast.BinOp):
        return isinstance(expr.op, ast.Div) or _is_float(expr.left, frame) or _is_float(expr.right, frame)
    held = expr.value if isinstance(expr, ast.Constant) else _held(expr, frame)
    return not isinstance(held, (int, Tensor))


def _is_concatenation(expr: ast.expr, frame: FrameType) -> bool:
    """Whether an expression puts lists or tuples together, whose items stay the same: ``shape[:-1] + (n,)``."""
    if isinstance(expr, ast.BinOp):
        sides = (expr.left, expr.right)
        return isinstance(expr.op, ast.Add) and any(_is_concatenation(side, frame) for side in sides)
    return isinstance(expr, (ast.List, ast.Tuple)) or isinstance(_held(expr, frame), (list, tuple))


def _reads_sizes(called: ast.expr) -> bool:
    """Whether a method returns sizes with their expressions, as far as its name says."""
    return isinstance(called, ast.Attribute) and called.attr in _READS - _LOST


def _drops_expressions(function: Any) -> bool:
    """Whether a function may return a number without its expression: it is not written in Python, or its code may."""
    while (inner := getattr(function, "__dict__", {}).get("__wrapped__")) is not None:  # of a decorator, a cache
        function = inner
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return all(function is not other for other in _KEEPING) if code is None else _code_drops_expressions(code)


@functools.cache
def _code_drops_expressions(code: CodeType) -> bool:
    tree = syntax_of(code)
    if tree is None:
        return True
    in_errors = {node for error in nodes_of(tree, ast.Raise, ast.Assert) for node in ast.walk(error)}
    return any(_is_dropping(node) for node in ast.walk(tree) if node not in in_errors)


def _is_dropping(node: ast.AST) -> bool:
    """Whether a node drops the expressions of numbers, whatever its variables hold."""
    match node:
        case ast.BinOp(left=ast.Constant(value=float() | str())):
            return True
        case ast.BinOp(left=ast.List() | ast.Tuple(), op=ast.Mult()):
            return True
        case ast.BinOp(left=ast.Attribute(value=ast.Name(id="math")) | ast.BinOp(op=ast.Div())):
            return True
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name not in _OF_MATH
        case ast.Call(func=ast.Name(id=name)):
            return name in _DROPPING
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _PACKAGES or name in _LOST or name in ("format", "to_bytes")
    return isinstance(node, ast.JoinedStr)


def _dimensions(expr: ast.AST, frame: FrameType) -> tuple[Tensor, Sequence[int]] | None:
    """Return a tensor and the dimensions whose sizes an expression reads literally; None for any other expression."""
    match expr:
        case (
            ast.Subscript(value=ast.Attribute(value=of, attr="shape"), slice=dim)
            | ast.Call(func=ast.Attribute(value=of, attr="size"), args=[dim])
        ):
            bounds = [dim.lower, dim.upper, dim.step] if isinstance(dim, ast.Slice) else [dim]
            held = _held(of, frame)
            if isinstance(held, Tensor) and all(b is None or is_literal(b) for b in bounds):
                ends = [None if b is None else ast.literal_eval(b) for b in bounds]
                dims = range(held.ndim)  # the variable may have held a tensor with more of them
                if isinstance(dim, ast.Slice):
                    return held, dims[slice(*ends)]
                return held, [d for d in dims if d - ends[0] in (0, len(dims))]  # type: ignore[operator]
    return None


def _may_be_computed(held: Any) -> bool:
    """Whether a value is a plain number other than a bool, or a collection that may contain one."""
    items = held if isinstance(held, (list, tuple)) else [held]
    return any(isinstance(i, (int, float, complex)) and not isinstance(i, bool) and not is_tagged(i) for i in items)


def _is_counted(expr: ast.AST, frame: FrameType) -> bool:
    """Whether an expression gives a tensor, whose length is noted by itself, or its sizes, which any removal keeps."""
    match expr:
        case ast.Attribute(value=of, attr="shape") | ast.Call(func=ast.Attribute(value=of, attr="size"), args=[]):
            return _is_tensor(of, frame)
    return _is_tensor(expr, frame)


def _is_tensor(expr: ast.AST, frame: FrameType) -> bool:
    """Whether an expression is certainly a tensor: the result of an op, or computed from one."""
    if isinstance(expr, ast.Attribute) and isinstance(_held(expr.value, frame), Tensor):
        is_own = isinstance(inspect.getattr_static(Tensor, expr.attr, None), GetSetDescriptorType)
        return is_own and expr.attr not in _READS | _DESCRIPTIONS and not expr.attr.startswith("is_")
    if isinstance(expr, (ast.Name, ast.Attribute)):
        return isinstance(_held(expr, frame), Tensor)
    if isinstance(expr, ast.Subscript):
        return _is_tensor(expr.value, frame)
    if isinstance(expr, ast.BinOp):
        return _is_tensor(expr.left, frame) or _is_tensor(expr.right, frame)
    if not isinstance(expr, ast.Call):
        return False
    function = _held(expr.func, frame)
    if isinstance(function, nn.Module) or getattr(function, "__module__", None) == "torch.nn.functional":
        return True
    if not isinstance(expr.func, ast.Attribute) or expr.func.attr in _READS:
        return False
    is_of_torch = _held(expr.func.value, frame) is torch and expr.func.attr not in _WITHOUT_TENSORS
    operands = expr.args if is_of_torch else [expr.func.value]
    return any(_is_tensor(operand, frame) for operand in operands)


def _held(expr: ast.AST, frame: FrameType) -> Any:
    """Return the value of a variable, or of an attribute that can be read without running code; else `_UNKNOWN`."""
    if isinstance(expr, ast.Name):
        frame = home(expr.id, frame)
        for space in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if expr.id in space:
                return space[expr.id]
    if isinstance(expr, ast.Attribute) and (owner := _held(expr.value, frame)) is not _UNKNOWN:
        own = getattr(owner, "__dict__", {}) if isinstance(owner, (nn.Module, ModuleType)) else {}
        for table in (own, *(own.get(name, {}) for name in ("_modules", "_parameters", "_buffers"))):
            if isinstance(table, dict) and expr.attr in table:
                return table[expr.attr]
        static = inspect.getattr_static(owner, expr.attr, _UNKNOWN)
        return _UNKNOWN if inspect.isdatadescriptor(static) else static
    return _UNKNOWN
