"""The source text of a function, provided that its running code was compiled from this text.

Python keeps the code but not the text: the text of a file edited after its import differs from the running code, and so
does that of a function rewritten by an import hook. Compiling such a text would change the function.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import os
import stat
import sys
import warnings
from collections.abc import Collection
from types import CodeType, FunctionType
from typing import Any

from engine.source.instructions import arguments_of, positions
from engine.source.sites import is_library

__all__ = [
    "edited_syntax",
    "keep_text",
    "lambdas_of_file",
    "lines_of",
    "same_code",
    "source_of",
    "syntax_of",
    "syntax_of_file",
    "text_of",
]


@functools.cache
def source_of(function: FunctionType) -> str | None:
    """Return the source text of a function from its file; None if the running code is different.

    Example:
        >>> source_of(same_code).startswith("def same_code")
        True
    """
    try:
        file = "".join(inspect.findsource(function)[0])
        text = inspect.getsource(function)
    except (OSError, TypeError, SyntaxError, IndexError):  # typed into an interpreter, or a file that is cut off
        return None
    return text if _is_compiled_from(function.__code__, file) else None


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
            warnings.simplefilter("ignore")  # warnings about the text, which its author has seen
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


# ---------------------------------------------------------------- the text of running code


def text_of(code: CodeType) -> str:
    """Return the text of the file that a function was compiled from; empty if the file has changed since.

    Args:
        code: of the function.

    Example:
        >>> "def text_of" in text_of(text_of.__code__), text_of(compile("1", "<nowhere>", "eval"))
        (True, '')
    """
    return _joined(code, code.co_filename)


def lines_of(code: CodeType) -> list[str]:
    """Return the lines of `text_of`."""
    return _lines_of(code, code.co_filename)


@functools.cache
def _joined(code: CodeType, file: str) -> str:
    return "".join(_lines_of(code, file))


@functools.cache
def _lines_of(code: CodeType, file: str) -> list[str]:  # equal code may be in two files
    lines = linecache.getlines(file) or _lines_of_command(file)
    if not lines or is_library(file) or code in _EDITED or _is_compiled_from(code, "".join(lines)):
        return lines
    linecache.checkcache(file)  # a module that was loaded again runs a later text
    lines = linecache.getlines(file)
    return lines if _is_compiled_from(code, "".join(lines)) else []


@functools.cache
def syntax_of(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the syntax of a function; None without source."""
    lines = lines_of(code)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    try:
        text = "".join(inspect.getblock(lines))
        indented = text[:1].isspace()
        tree = ast.parse(f"if 1:\n{text}" if indented else text)
    except (SyntaxError, ValueError, IndexError):
        return None
    ast.increment_lineno(tree, code.co_firstlineno - (2 if indented else 1))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.name == code.co_name]
    return functions[0] if functions else None


def _lines_of_command(file: str) -> list[str]:
    """Return the text of ``python -c``, or of the file that is the interpreter's standard input."""
    if file == "<string>" and "-c" in sys.orig_argv[:-1]:
        return sys.orig_argv[sys.orig_argv.index("-c") + 1].splitlines(keepends=True)
    return _lines_of_input() if file == "<stdin>" and hasattr(os, "pread") else []


def _lines_of_input() -> list[str]:
    """Return the lines of the standard input where it is a file; a pipe has none left."""
    try:
        status = os.fstat(_STDIN)
        text = os.pread(_STDIN, status.st_size, 0) if stat.S_ISREG(status.st_mode) else b""
    except OSError:  # a process without an input
        return []
    return text.decode(errors="replace").splitlines(keepends=True)


_STDIN = 0
_EDITED: dict[CodeType, ast.AST] = {}


def keep_text(code: CodeType, tree: ast.AST) -> None:
    """Register the edited syntax tree from which code was compiled, with the text of its file.

    Args:
        code: of a function, with the functions in it.
        tree: the edited tree, with its positions in the file.
    """
    _EDITED[code] = tree
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            keep_text(constant, tree)


def edited_syntax(code: CodeType) -> ast.AST | None:
    """Return the syntax tree that code was compiled from, if it differs from that of its text."""
    return _EDITED.get(code)


def _is_compiled_from(code: CodeType, text: str) -> bool:
    others = _compiled(text).get((code.co_name, code.co_firstlineno), ())
    if any(same_code(other, code) for other in others):
        return True
    asserts = _lines_of_asserts(text) if others and _has_rewritten_asserts(code) else frozenset()
    return any(_steps(other, asserts) == _steps(code, asserts) for other in others)


def _has_rewritten_asserts(code: CodeType) -> bool:
    """Whether pytest has replaced the assertions in a function by code that explains them."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(name.startswith("@py_") for name in code.co_varnames) or any(map(_has_rewritten_asserts, inner))


_CALLS = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL_FUNCTION"}
_NO_STEPS = frozenset("CACHE EXTENDED_ARG NOP PRECALL PUSH_NULL".split())
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_FLAGS = 0xFFFF
"""Flags of a function; higher bits are for ``from __future__``, which a notebook passes on from cell to cell."""


def _steps(code: CodeType, left_out: Collection[int]) -> tuple[Any, ...]:
    """Return the instructions of code, with their positions in the text.

    Whether ``F.relu(x)`` is compiled to a method call depends on whether the import of ``F`` is compiled along, and a
    notebook compiles each statement of a cell separately.

    Args:
        code: of a function.
        left_out: lines to ignore.
    """
    places = positions(code)
    steps = [
        (_CALLS.get(step.opname, step.opname), step.opcode in _JUMPS or _value_of(step, left_out), where)
        for step in dis.get_instructions(code)
        if step.opname not in _NO_STEPS and (where := places[step.offset // 2])[0] not in left_out
    ]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _FLAGS
    return steps, counts, arguments_of(code), code.co_freevars, code.co_cellvars


def _value_of(step: Any, left_out: Collection[int]) -> Any:
    value = step.argval
    return _steps(value, left_out) if isinstance(value, CodeType) else _constant_key(value)


@functools.lru_cache(maxsize=64)
def _lines_of_asserts(text: str) -> frozenset[int]:
    asserts = (node for node in ast.walk(syntax_of_file(text)) if isinstance(node, ast.Assert))
    return frozenset(line for node in asserts for line in range(node.lineno, (node.end_lineno or 0) + 1))
