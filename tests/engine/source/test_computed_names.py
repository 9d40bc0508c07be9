"""Names under which code sets attributes by a function."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.source.computed_names import names_set_by_functions

KEYS = ("a", "b")


def _literal(self: Any) -> None:
    setattr(self, "a", 1)  # noqa: B010
    delattr(self, "b")


def _from_list(self: Any, part: Any) -> None:
    names = ["a", "b"] if part else ["c"]
    for name in names:
        if hasattr(self, name):
            setattr(self, name, part)


def _by_method(self: Any) -> None:
    object.__setattr__(self, "a", 1)
    self.__setattr__("b", 2)
    super(type(self), self).__setattr__("c", 3)


def _of_a_part(self: Any, key: str) -> None:
    setattr(self.part, "a", 1)  # noqa: B010
    setattr(key, key, 1)


def _by_another_name(self: Any, part: Any) -> None:
    net = self
    for name in ("a", "b"):
        setattr(net, name, part)


def _of_what_a_call_returns(self: Any, key: str) -> None:
    setattr(self.part(), key, 1)


def _partial(self: Any) -> None:
    put = functools.partial(setattr, self)
    for name in ("a", "b"):
        put(name, 1)


def _mapped(self: Any) -> None:
    list(map(setattr, [self], ["a"], [1]))


def _bound(self: Any) -> None:
    put = self.__setattr__
    put("a", 1)


def _unpacked(self: Any, *args: Any) -> None:
    setattr(*args)


def _argument(self: Any, key: str) -> None:
    setattr(self, key, 1)


def _of_a_part_by_argument(self: Any, key: str) -> None:
    setattr(self.part, key, 1)


def _global(self: Any) -> None:
    for key in KEYS:
        setattr(self, key, 1)


def _extended(self: Any, key: str) -> None:
    names = ["a"]
    names.append(key)
    for name in names:
        setattr(self, name, 1)


def _filled_by_a_function(self: Any, fill: Any) -> None:
    names = ["a"]
    fill(names)
    for name in names:
        setattr(self, name, 1)


def _put_together(self: Any) -> None:
    for name in ("a", "b"):
        setattr(self, f"{name}_", 1)


def _put_together_of_more(self: Any, key: str) -> None:
    for name in ("a", "b"):
        setattr(self, f"{name}_{key}", 1)


def _formatted(self: Any) -> None:
    for name in ("a", "b"):
        setattr(self, f"{name:>3}", 1)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_literal, {"a", "b"}),
        (_from_list, {"a", "b", "c"}),
        (_by_method, {"a", "b", "c"}),
        (_of_a_part, set()),
        (_by_another_name, {"a", "b"}),
        (_of_what_a_call_returns, None),
        (_partial, None),
        (_mapped, None),
        (_bound, None),
        (_unpacked, None),
        (_argument, None),
        (_of_a_part_by_argument, None),
        (_global, None),
        (_extended, None),
        (_filled_by_a_function, None),
        (_put_together, {"a_", "b_"}),
        (_put_together_of_more, None),
        (_formatted, None),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_names(function: Any, names: set[str] | None) -> None:
    """Those that the code writes out; None where it computes one, or gets it from outside."""
    result = names_set_by_functions(function.__code__, "self")
    assert (None if result is None else set(result[0])) == names


def test_names_of_other_objects() -> None:
    """They are told apart from the variable's own."""

    def function(self: Any, blocks: Any) -> None:
        for block in blocks:
            for key in ("s1", "s2"):
                setattr(block, key, 1)
        delattr(self, "old")

    result = names_set_by_functions(function.__code__, "self")
    assert result is not None and [sorted(names) for names in result] == [["old"], ["s1", "s2"]]
