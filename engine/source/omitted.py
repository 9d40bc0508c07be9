"""Variables that take the place of arguments which a call leaves out."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

from engine.source.bindings import bindings
from engine.source.branches import Branching
from engine.source.entrywise import names_read

__all__ = ["stand_ins"]


def stand_ins(function: Branching, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that may take the place of arguments that are None, with these.

    Args:
        function: that begins to run.
        variables: what its variables hold then.

    Example:
        >>> from engine.source.branches import syntax_of
        >>> function = Branching(names_read.__code__, syntax_of(names_read.__code__))
        >>> stand_ins(function, {"node": None}).get("node")
        'node'
    """
    code = function.code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    absent = [name for name in arguments if name in variables and variables[name] is None]
    result = {name: name for name in absent}
    for target, read in _read_for(function.tree) if absent else ():
        if target not in arguments:
            result.update((target, name) for name in absent if name in read)
    return result


@functools.cache
def _read_for(tree: ast.AST) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the variables of a function, with those that they are made of."""
    held = {name: own for name, own in bindings(tree).items() if name.isidentifier()}
    return tuple((name, frozenset(n for b in own for n in names_read(b.value))) for name, own in held.items())
