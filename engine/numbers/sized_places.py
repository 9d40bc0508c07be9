"""Expressions and functions at the places in code, as files and lines, where sizes decide."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection
from types import CodeType

from engine.source.instructions import cached_by_identity

__all__ = ["has_place", "is_at"]


def is_at(node: ast.expr, file: str, places: Collection[str]) -> bool:
    """Whether an expression is on one of the given lines.

    Args:
        node: of a function.
        file: of the function.
        places: files and lines.

    Example:
        >>> is_at(ast.parse("size > 3", mode="eval").body, "net.py", {"net.py:1"})
        True
    """
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return any(f"{file}:{line}" in places for line in lines)


def has_place(code: CodeType, places: Collection[str]) -> bool:
    """Whether one of the given places is in a function.

    Args:
        code: of the function.
        places: files and lines.

    Example:
        >>> code = compile("def is_large(x):\\n    return len(x) > 3", "net.py", "exec").co_consts[0]
        >>> has_place(code, {"net.py:2"}), has_place(code, {"net.py:7"})
        (True, False)
    """
    return any(place in places for place in _places(code)) if places else False


@cached_by_identity
def _places(code: CodeType) -> tuple[str, ...]:
    lines = dict.fromkeys(line for _, _, line in code.co_lines() if line is not None)
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return (*(f"{code.co_filename}:{line}" for line in lines), *itertools.chain.from_iterable(map(_places, inner)))
