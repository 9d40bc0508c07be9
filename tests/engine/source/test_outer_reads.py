"""Tests of what a function reads from outside."""

from __future__ import annotations

import contextvars
import math
import os
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from engine.source.outer_reads import UNSET, outer_reads

FLAG, TABLE, ITEMS = False, {"fast": False}, [1, 2]
SPACE = SimpleNamespace(inner=SimpleNamespace(depth=3))
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=2)


class Base:
    """Has an attribute."""

    width = 4


class Part(nn.Module):
    """Holds an object."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.options, self.depth = SimpleNamespace(fast=True), 2

    def reads(self) -> Any:
        """Read an attribute of an object, one of the class, and one of its own."""
        return self.options.fast, self.width, self.depth, type(self).width


def _globals() -> Any:
    return FLAG, TABLE["fast"], TABLE.get("slow", 1), ITEMS[1], SPACE.inner.depth, Base.width, CONTEXT.get()


def _imported() -> Any:
    from tests.engine.source import test_outer_reads as here
    from tests.engine.source.test_outer_reads import FLAG

    return here.TABLE["fast"], FLAG


def _environment(name: str) -> Any:
    return os.environ["A"], os.environ.get("B", "0"), os.getenv("C"), "D" in os.environ, os.environ.get(name)


def _foreign() -> Any:
    return math.pi, nn.Linear.in_features, os.devnull


def _texts(function: Any, owner: nn.Module | None = None) -> dict[str, Any]:
    code = function.__code__
    return {r.text: r.value for r in outer_reads(code, globals(), owner, lambda file: file == __file__)}


def test_globals() -> None:
    """Names, items, attributes of objects and classes, and context variables, with their values."""
    texts = _texts(_globals)
    plain = {text: value for text, value in texts.items() if value is UNSET or isinstance(value, (bool, int))}
    assert plain == {
        "FLAG": False,
        "TABLE['fast']": False,
        "TABLE.get('slow', 1)": UNSET,
        "ITEMS[1]": 2,
        "SPACE.inner.depth": 3,
        "Base.width": 4,
        "CONTEXT.get()": 2,
    }


def test_a_module() -> None:
    """An object that it holds, and attributes of its class; its own attributes are looked at elsewhere."""
    texts = _texts(Part.reads, Part())
    assert texts["self.options.fast"] is True and texts["type(self).width"] == 4 and "self.depth" not in texts


def test_imports() -> None:
    """What a function imports is what the Python module holds."""
    assert {"here.TABLE['fast']", "FLAG"} <= _texts(_imported).keys()


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is read, by a name that the code has."""
    monkeypatch.setenv("A", "1")
    texts = _texts(_environment)
    assert texts["os.environ['A']"] == "1"
    assert {"os.environ.get('B', '0')", "os.getenv('C')", "'D' in os.environ"} <= texts.keys()
    assert "os.environ.get(name)" not in texts


def test_other_packages() -> None:
    """What other packages hold is left out."""
    assert not {"math.pi", "nn.Linear.in_features", "os.devnull"} & _texts(_foreign).keys()


class Kind(Enum):
    """Kinds of layers."""

    SLOW = 1
    FAST = 2


def _constants() -> Any:
    return Kind.FAST, int.real, nn.Linear.bias, Base.width


def test_members_and_classes_of_others() -> None:
    """A member of an enumeration is no option, and classes of other packages are not assigned to."""
    texts = _texts(_constants).keys()
    assert "Base.width" in texts and not {"Kind.FAST", "int.real", "nn.Linear.bias"} & texts


@pytest.mark.parametrize("value", [7, UNSET])
def test_another_value(value: Any) -> None:
    """An item is another one, or removed, and as before behind that."""
    table = dict(TABLE)
    read = next(r for r in outer_reads(_globals.__code__, globals() | {"TABLE": table}, None, str) if "fast" in r.text)
    with read.holding(value):
        assert read.value is value and ("fast" in table) is (value is not UNSET)
    assert table == TABLE


def test_a_context_variable_is_unset_again() -> None:
    """One that only has a default is not set to it."""
    read = next(r for r in outer_reads(_globals.__code__, globals(), None, str) if r.holder is CONTEXT)
    with read.holding(5):
        assert CONTEXT.get() == 5
    assert CONTEXT not in contextvars.copy_context()


def test_a_lambda_function() -> None:
    """What it returns is looked up where it stands in the file."""
    assert "FLAG" in _texts(READS)


READS = lambda x: x if FLAG else -x  # noqa: E731
