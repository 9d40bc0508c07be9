"""The source text of a function, where it is the text that its running code was compiled from.

Python keeps code and not text: a file that was edited after it was imported has other text than the code that runs, and
so has a function that an import hook rewrote. To work on the text is then to change the function.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from types import CodeType, FunctionType
from typing import Any

__all__ = ["same_code", "source_of"]


@functools.cache
def source_of(function: FunctionType) -> str | None:
    """Return the source text of a function as it stands in its file; None where that is not what runs.

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
    place = code.co_name, code.co_firstlineno
    return text if any(same_code(other, code) for other in _compiled(file).get(place, ())) else None


@functools.lru_cache(maxsize=64)
def _compiled(file: str) -> dict[tuple[str, int], list[CodeType]]:
    """Return the functions in the text of a file by name and line.

    The file as a whole: how a call of `torch.reshape` is compiled depends on whether the file imports `torch`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the text, whose author has seen them
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
    """Whether two pieces of code do the same: instructions, constants and names; where they stand does not matter.

    Example:
        >>> same_code((lambda x: x + 1).__code__, (lambda x: x + 1).__code__)
        True
        >>> same_code((lambda x: x + 1).__code__, (lambda x: x + 1.0).__code__)
        False
    """
    return _form(one) == _form(other)


def _form(code: CodeType) -> tuple[Any, ...]:
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    table = getattr(code, "co_exceptiontable", b"")
    return code.co_code, table, names, counts, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    """Return a constant so that equal ones of other types differ, and NaN is itself."""
    if isinstance(value, CodeType):
        return _form(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        return sorted(map(repr, map(_constant, value)))
    return type(value).__name__, repr(value)
