"""Names that code uses whenever it runs."""

from __future__ import annotations

import ast
from typing import Any

from engine.flow.names_used import attributes_used, globals_used
from engine.source.function_text import syntax_of


def _method(self: Any, x: Any) -> Any:
    x = self.layer(x)
    if x.flag:
        x = self.other(x)
    return undefined(x) + self.plain  # type: ignore[name-defined]  # noqa: F821


def test_attributes_that_are_always_used() -> None:
    """A branch need not run, and an attribute that is only read may be anything."""
    tree = syntax_of(_method.__code__)
    assert tree is not None
    assert attributes_used(tuple(tree.body), "self") == ("layer",)


def test_globals_that_are_always_used() -> None:
    """Variables of the function are none."""
    tree = syntax_of(_method.__code__)
    assert tree is not None
    assert globals_used(tuple(tree.body), _method.__code__) == ("undefined",)
    assert globals_used((ast.parse("x", mode="eval").body,), _method.__code__) == ()
