"""Numbers in a syntax tree, as lists in which they can be replaced."""

from __future__ import annotations

import ast
from typing import Any

__all__ = ["Bounds", "Sides", "Tail"]


class Sides(list[ast.expr]):
    """The operands of an operator; setting an item changes the tree.

    Example:
        >>> tree = ast.parse("x * heads", mode="eval")
        >>> Sides(tree.body)[1] = ast.Constant(4)
        >>> ast.unparse(tree)
        'x * 4'
    """

    def __init__(self, operation: ast.BinOp) -> None:
        super().__init__([operation.left, operation.right])
        self._operation = operation

    def __setitem__(self, position: Any, value: Any) -> None:
        super().__setitem__(position, value)
        setattr(self._operation, ("left", "right")[position], value)


class Tail(list[ast.expr]):
    """The arguments of a call from a position on; setting an item changes the call.

    Example:
        >>> tree = ast.parse("x.view(n, heads)", mode="eval")
        >>> Tail(tree.body.args, 1)[0] = ast.Constant(4)
        >>> ast.unparse(tree)
        'x.view(n, 4)'
    """

    def __init__(self, args: list[ast.expr], start: int) -> None:
        super().__init__(args[start:])
        self._args, self._start = args, start

    def __setitem__(self, position: Any, value: Any) -> None:
        super().__setitem__(position, value)
        self._args[self._start + position] = value


class Bounds(list[ast.expr]):
    """Start and end of a slice; setting an item changes the slice.

    Example:
        >>> tree = ast.parse("x[..., heads:2 * heads]", mode="eval")
        >>> Bounds.of(tree.body)[1] = ast.Constant(4)
        >>> ast.unparse(tree)
        'x[..., heads:4]'
        >>> Bounds.of(ast.parse("x[a:b, c:d]", mode="eval").body) is None
        True
    """

    def __init__(self, part: ast.Slice) -> None:
        super().__init__([ast.Constant(None) if bound is None else bound for bound in (part.lower, part.upper)])
        self._part = part

    @classmethod
    def of(cls, subscript: ast.Subscript) -> Bounds | None:
        """Return the bounds of the only slice with bounds in a subscript; None if there are several or none."""
        index = subscript.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        slices = [p for p in parts if isinstance(p, ast.Slice) and (p.lower or p.upper) is not None]
        return cls(slices[0]) if len(slices) == 1 else None

    def __setitem__(self, position: Any, value: Any) -> None:
        super().__setitem__(position, value)
        setattr(self._part, ("lower", "upper")[position], value)
