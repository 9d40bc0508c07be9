"""Instructions of functions."""

from __future__ import annotations

from typing import Any

from engine.source.instructions import instructions, named_instructions, positions


def _sum(x: Any) -> Any:
    total = sum(x)
    return total


def test_each_has_an_offset_a_name_and_a_position() -> None:
    """The lines are those of the file."""
    code = _sum.__code__
    first = code.co_firstlineno
    assert any(name.startswith("STORE_FAST") for _, name in instructions(code))
    assert {name for _, line, name in named_instructions(code) if line == first + 1 and name} >= {"sum", "x"}
    assert first + 2 in {line for line, *_ in positions(code)}
