"""The source text of a function, provided that its running code was compiled from this text.

Python keeps the code and not the text: the text of a file that was edited after its import differs from the code that
runs, and so does that of a function rewritten by an import hook. To compile an edited text would change the function.
"""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from types import CodeType, FunctionType
from typing import Any

__all__ = ["lambdas_of_file", "same_code", "source_of", "syntax_of_file"]


@functools.cache
def source_of(function: FunctionType) -> str | None:
    """Return the source text of a function from its file; None if other code runs.

    Example:
        >>> source_of(same_code).startswith("def same_code")
        True
    """
    try:
        file = "".join(inspect.findsource(function)[0])
        text = inspect.getsource(function)
    except (OSError, TypeError, SyntaxError, IndexError):  # typed into an interpreter, or a file that is cut off
        return None
    code = function.__code__
    where = code.co_name, code.co_firstlineno
    return text if any(same_code(other, code) for other in _compiled(file).get(where, ())) else None


@functools.lru_cache(maxsize=64)
def syntax_of_file(file: str) -> ast.Module:
    """Parse the text of a file; several analyses read the same syntax tree, and none changes it.

    Raises:
        SyntaxError, ValueError: if the text is no Python.

    Example:
        >>> syntax_of_file("x = 1") is syntax_of_file("x = 1")
        True
    """
    return ast.parse(file)


@functools.lru_cache(maxsize=64)
def lambdas_of_file(file: str) -> dict[int, list[ast.Lambda]]:
    """Return the lambda functions in the text of a file by their lines.

    Raises:
        SyntaxError, ValueError: if the text is no Python.

    Example:
        >>> {line: len(lambdas) for line, lambdas in lambdas_of_file("f, g = lambda: 1, lambda: 2").items()}
        {1: 2}
    """
    by_line: dict[int, list[ast.Lambda]] = {}
    for node in ast.walk(syntax_of_file(file)):
        if isinstance(node, ast.Lambda):
            by_line.setdefault(node.lineno, []).append(node)
    return by_line


@functools.lru_cache(maxsize=64)
def _compiled(file: str) -> dict[tuple[str, int], list[CodeType]]:
    """Return the functions in the text of a file by name and line.

    The whole file is compiled: the code of a call of `torch.reshape` depends on whether the file imports `torch`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the author of the text has seen them
            rest = [compile(file, "<text>", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}
    functions: dict[tuple[str, int], list[CodeType]] = {}
    while rest:
        code = rest.pop()
        functions.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        rest += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return functions


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects have the same instructions, constants and names, wherever they are in a file.

    Example:
        >>> same_code((lambda x: x + 1).__code__, (lambda x: x + 1).__code__)
        True
        >>> same_code((lambda x: x + 1).__code__, (lambda x: x + 1.0).__code__)
        False
    """
    return _key(one) == _key(other)


def _key(code: CodeType) -> tuple[Any, ...]:
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    table = getattr(code, "co_exceptiontable", b"")
    return code.co_code, table, names, counts, tuple(map(_constant_key, code.co_consts))


def _constant_key(value: Any) -> Any:
    """Return a key for a constant that differs between types, and is equal for NaN and itself."""
    if isinstance(value, CodeType):
        return _key(value)
    if isinstance(value, tuple):
        return tuple(map(_constant_key, value))
    if isinstance(value, frozenset):
        return sorted(map(repr, map(_constant_key, value)))
    return type(value).__name__, repr(value)
