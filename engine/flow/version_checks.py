"""Functions that compare the version of a package, such as ``is_torch_version("<", "2.0.0")``."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

__all__ = ["version_check"]

_VERSION = re.compile(r"\d+(\.\d+)+\w*")
_CACHED = type(functools.cache(int))


def version_check(call: ast.expr, function: Any) -> bool | None:
    """Return the result of a version check; None for any other call.

    A version check is a cached function called with literals, one of which is a version: its result cannot change while
    the process runs.

    Args:
        call: an expression.
        function: the called function, if the expression is a call.

    Example:
        >>> @functools.cache
        ... def at_least(version: str) -> bool:
        ...     return (2, 6) >= tuple(map(int, version.split(".")))
        >>> texts = ("at_least('2.4')", "at_least('3.0')", "at_least(version)", "at_least('any')")
        >>> [version_check(ast.parse(text, mode="eval").body, at_least) for text in texts]
        [True, False, None, None]
    """
    if not isinstance(call, ast.Call) or call.keywords or not isinstance(function, _CACHED):
        return None
    literals = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    if len(literals) < len(call.args) or not any(isinstance(v, str) and _VERSION.fullmatch(v) for v in literals):
        return None
    result = function(*literals)
    return result if isinstance(result, bool) else None
