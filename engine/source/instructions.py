"""The instructions of a function: their offsets, names, lines and positions in the source."""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

__all__ = [
    "arguments_of",
    "cached_by_identity",
    "has_while_loop",
    "instructions",
    "named_instructions",
    "positions",
]

T = TypeVar("T")

_ITERATES = {"FOR_ITER", "SEND", "GET_ANEXT"}
"""The instruction that a loop over an iterable jumps back to; any other loop may not end."""


def cached_by_identity(function: Callable[..., T]) -> Callable[..., T]:
    """Cache a function whose first argument is code.

    Code of two files, or of a file that is loaded twice, is equal where its instructions, names and lines are, though
    it belongs to other files and is another object in the recordings.

    Args:
        function: of code, and further hashable arguments.

    Example:
        >>> one, other = (compile("pass", file, "exec") for file in ("one.py", "other.py"))
        >>> file_of = cached_by_identity(lambda code: code.co_filename)
        >>> one == other, file_of(one), file_of(other)
        (True, 'one.py', 'other.py')
    """
    results: dict[tuple[Any, ...], tuple[CodeType, T]] = {}  # with the code, so that no other one has its identity

    @functools.wraps(function)
    def cached(code: CodeType, *arguments: Any) -> T:
        key = id(code), *arguments
        if key not in results:
            results[key] = code, function(code, *arguments)
        return results[key][1]

    vars(cached)["cache_clear"] = results.clear  # like that of `functools.cache`
    return cached


def arguments_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's arguments, ``*args`` and ``**kwargs`` included.

    Example:
        >>> arguments_of((lambda x, *args, flag=True, **kwargs: x).__code__)
        ('x', 'flag', 'args', 'kwargs')
    """
    rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + rest]


@functools.cache
def instructions(code: CodeType) -> tuple[tuple[int, str], ...]:
    """Return offset and name of each instruction of a function."""
    return tuple((instruction.offset, instruction.opname) for instruction in dis.get_instructions(code))


@functools.cache
def named_instructions(code: CodeType) -> list[tuple[int, int, str | None]]:
    """Return offset, line and name of each instruction of a function."""
    steps: list[tuple[int, int, str | None]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = line if instruction.starts_line is None else _line_of(instruction)
        steps.append((instruction.offset, line, instruction.argval if isinstance(instruction.argval, str) else None))
    return steps


def has_while_loop(code: CodeType) -> bool:
    """Whether a function has a loop that runs as long as a condition holds.

    Example:
        >>> has_while_loop(compile("while x: x -= 1", "", "exec"))
        True
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    names = {step.offset: step.opname for step in steps}
    offsets = sorted(names)
    targets = [step.argval for step in steps if step.opcode in dis.hasjrel and step.argval <= step.offset]
    return any(names[offsets[bisect.bisect_left(offsets, target)]] not in _ITERATES for target in targets)


def _line_of(instruction: dis.Instruction) -> int:
    """Return the line that an instruction starts; Python 3.13 keeps it elsewhere."""
    number = getattr(instruction, "line_number", None)
    return int(number if number is not None else instruction.starts_line or 0)


def positions(code: CodeType) -> list[Any]:
    """Return the position of each instruction in the source: lines, then columns, which may be None."""
    return list(code.co_positions())
