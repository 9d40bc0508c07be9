"""Variables whose sizes become factors or results, as in ``y / h.size(-1) ** 0.5`` and ``return y, h.shape``.

A size that only arranges entries (``h.view(h.shape[0], -1)``) follows when channels are removed; a number does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from engine.source.bindings import bindings

__all__ = ["names_measured", "numbers_measured"]

_FACTORS = (ast.Div, ast.Pow)
_LIBRARIES = frozenset({"math", "np", "numpy"})
"""Python modules whose functions return numbers."""


def names_measured(code: ast.AST) -> Iterator[str]:
    """Yield variables of which a size is used as a divisor, in a power, by a function of numbers, or as a result.

    The first size does not count, as it is the batch size. A variable that holds a size is followed within the code.

    Args:
        code: statements or an expression.

    Example:
        >>> text = "b, c = z.shape; y = x.view(len(x), w.size(1) // 2) / h.size(-1) ** 0.5 * c ** 2 / v.shape[0]"
        >>> sorted(set(names_measured(ast.parse(text))))
        ['h', 'z']
    """
    for part in getattr(code, "body", ()):
        if isinstance(part, ast.expr):  # of a conditional expression
            yield from _sizes_given(part, code)
    for node in ast.walk(code):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from _sizes_given(node.value, code)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, _FACTORS):
            yield from _sizes_in(node, code)
        elif isinstance(node, ast.Call) and _returns_a_number(node.func):
            for argument in node.args:
                yield from _sizes_in(argument, code)


def numbers_measured(code: ast.AST) -> Iterator[ast.expr]:
    """Yield variables, attributes and items that are used as divisors, in powers, or by functions of numbers.

    Args:
        code: statements or an expression.

    Example:
        >>> [ast.unparse(node) for node in numbers_measured(ast.parse("y / self.dim + math.log(n) * w"))]
        ['y', 'self.dim', 'n']
    """
    for node in ast.walk(code):
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, _FACTORS):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Call) and _returns_a_number(node.func):
            operands = node.args
        for operand in operands:
            inner = operand.operand if isinstance(operand, ast.UnaryOp) else operand
            if isinstance(inner, (ast.Name, ast.Attribute, ast.Subscript)):
                yield inner


def _sizes_given(node: ast.expr, code: ast.AST) -> Iterator[str]:
    """Yield the variables whose sizes are results, or items of results."""
    match node:
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Dict(values=items):
            for item in items:
                yield from _sizes_given(item, code)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name[:1].isupper() or name == "dict":
            for item in (*args, *(keyword.value for keyword in keywords)):
                yield from _sizes_given(item, code)
        case _:
            yield from _sizes_in(node, code)


def _sizes_in(node: ast.AST, code: ast.AST) -> Iterator[str]:
    """Yield the variables whose sizes are read in an expression."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=0)):
            return
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=0)]):
            return
        case ast.Attribute(value=ast.Name(id=name), attr="shape" | "size" | "numel" | "nelement"):
            yield name
        case ast.Name(id=name):
            values = (binding.value for binding in bindings(code).get(name, ()))
            yield from (measured for value in values if _is_size(value) for measured in _sizes_in(value, code))
        case ast.Call(func=function) if not _is_size(node) and not _returns_a_number(function):
            return  # what is computed from tensors, which may be arranged by sizes
        case _:
            for inner in ast.iter_child_nodes(node):
                yield from _sizes_in(inner, code)


def _is_size(node: ast.expr) -> bool:
    """Whether an expression is a size, or all sizes, of a variable."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "size", "numel", "nelement")


def _returns_a_number(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.value.id in _LIBRARIES
    return isinstance(function, ast.Name) and function.id == "float"
