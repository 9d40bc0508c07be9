"""Containers in each other."""

from __future__ import annotations

from typing import Any

import pytest

from engine.files.nesting import check_nesting


def nested(depth: int, shared: bool) -> list[Any]:
    """Lists in each other; shared: each holds the one below twice."""
    value: list[Any] = [0]
    for _ in range(depth - 1):
        value = [value, value] if shared else [value]
    return value


@pytest.mark.parametrize("shared", [False, True])
def test_depth(shared: bool) -> None:
    """A hundred levels pass, one more does not; a container that is referred to twice is looked at once."""
    check_nesting(nested(100, shared))
    with pytest.raises(ValueError, match="nested too deep"):
        check_nesting(nested(102, shared))


def test_a_container_in_itself() -> None:
    """Refused, also by way of a dictionary."""
    circle: list[Any] = []
    circle.append({"a": circle})
    with pytest.raises(ValueError, match="hold themselves"):
        check_nesting({"x": circle})
