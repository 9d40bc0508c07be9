"""Places at which sizes decide."""

from __future__ import annotations

import ast
from typing import Any

from engine.numbers.sized_places import has_place, is_at


def _is_large(x: Any) -> bool:
    return len(x) > 3


def test_expressions_on_several_lines() -> None:
    """Any of their lines counts."""
    test = ast.parse("(a >\n b)", mode="eval").body
    assert is_at(test, "net.py", {"net.py:2"}) and not is_at(test, "net.py", {"net.py:3", "other.py:2"})


def test_functions_with_a_place() -> None:
    """The lines are those of the function's own code."""
    code = _is_large.__code__
    line = code.co_firstlineno
    assert has_place(code, {f"{code.co_filename}:{line + 1}"})
    assert not has_place(code, {f"{code.co_filename}:{line + 9}"}) and not has_place(code, ())
