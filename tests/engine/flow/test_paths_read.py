"""Which parts of an object a branch reads."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.flow.branches import Branch
from engine.flow.paths_read import NumberRead, PartsRead, parts_read, picks_by_literals, state_read
from engine.numbers.sizes import Size
from engine.program.expressions import AttributeOf

_H = torch.ones(2)


class _Slots:
    __slots__ = ("h", "y")


class _Computed:
    def __init__(self) -> None:
        self.own = 1

    @property
    def h(self) -> int:
        """Run code."""
        raise AssertionError


class _Dynamic:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError


class _Module(nn.Module):
    index = 1

    def __init__(self) -> None:
        super().__init__()
        self.place = 1


def _read(thing: Any, code: str, **others: Any) -> Any:
    branch = Branch(ast.parse(code).body, None, frozenset())
    result = parts_read(thing, "out", branch, {"out": thing, **others})
    return result.items if isinstance(result, PartsRead) else result


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("y = out.many[1]", [20]),
        ("y = out.many[-1] + out.named['a']", [20, 3]),
        ("y = out.many[self.place]", [20]),
        ("y = out.many[5]", []),
        ("y = out.absent", []),
        ("y = out.absent.further[0]", []),
        ("y = out.inner.h.conjugate()", [4]),
        ("y = out.tensor.square().shape[0] + out.tensor[f(1)].mean()", [_H, _H]),
        ("y = out.method()", None),
        ("y = f(out)", None),
        ("y = out.many[f(1)]", None),
        ("out.many = 3", None),
        ("y = out.many[0:1]", None),
        ("y = out.many[0], out", None),
        ("y = 1", None),
    ],
)
def test_what_is_read(code: str, parts: list[int] | None) -> None:
    """Attributes and items of an object are read as they are now; it stands for itself where that cannot be told."""
    thing = SimpleNamespace(many=[10, 20], named={"a": 3}, inner=SimpleNamespace(h=4), tensor=_H)
    read = _read(thing, code, self=_Module())
    assert read is thing if parts is None else list(map(id, read)) == list(map(id, parts))


def test_no_code_of_the_object_runs() -> None:
    """Properties, attributes on demand and attributes of classes are not read."""
    for thing, code in (
        (_Computed(), "out.h"),
        (_Dynamic(), "out.h"),
        (_Module(), "out.index"),
        (_Computed(), "out.h.x"),
    ):
        assert _read(thing, code) is thing
    assert _read(_Computed(), "out.own") == [1]


def test_slots() -> None:
    """Slots are attributes, also where they are empty."""
    thing = _Slots()
    thing.h = 3
    assert _read(thing, "out.h + out.y") == [3]


_GLOBAL = [_H]


def test_state_that_is_read() -> None:
    """Attributes of modules and globals are read as they are now, and sizes only where they are numbers."""
    module = _Module()
    module.inner, module.held = _Module(), _H  # type: ignore[assignment]
    module.inner.held = {"a": _H}  # type: ignore[assignment]
    code = "y = self.held.mean() + self.inner.held['a'] + f(self.place, self.absent) + HELD[0]"
    branch = Branch(ast.parse(code).body, None, frozenset())
    state = dict(state_read(branch, {"self": module}, {"HELD": _GLOBAL, "f": len}))
    assert state.keys() == {"self.held.mean ", "self.inner.held['a'] ", "HELD[0] "} and all(
        t is _H for t in state.values()
    )


class _Reading(_Module):
    @property
    def hidden(self) -> Any:
        """What it holds."""
        return self.held

    def norm(self) -> Any:
        """Use it."""
        return self.hidden.norm()


@pytest.mark.parametrize(
    "code", ["self.hidden", "self.norm()", "self.held[f(1)]", "self.held[1:].mean()", "self.held.pop()"]
)
def test_state_that_cannot_be_told(code: str) -> None:
    """Methods and properties read what they name; of a container whose index cannot be told, all is read."""
    module = _Reading()
    module.held = [_H]  # type: ignore[assignment]
    state = dict(state_read(Branch(ast.parse(code).body, None, frozenset()), {"self": module}, {}))
    assert list(state.values()) == [module.held]


def test_sizes_that_are_read() -> None:
    """A size is read where it divides or is a power, a float that follows from sizes anywhere."""
    size = Size(8, AttributeOf("layer", "width"))
    for code, texts in (("y / n", {"n "}), ("y.view(n, -1)", set()), ("y * n ** -0.5", {"n "}), ("y * s", {"s "})):
        branch = Branch(ast.parse(code).body, None, frozenset())
        state = dict(state_read(branch, {"n": size, "s": size**0.5, "y": _H}, {}))
        assert state.keys() == texts and all(isinstance(number, NumberRead) for number in state.values())


@pytest.mark.parametrize(
    ("code", "picks"),
    [
        ("y = out[1]", True),
        ("y = out[-1].mean() + out[0]", True),
        ("y = out[i]", False),
        ("y = out[:2]", False),
        ("y = out.h", False),
        ("y = out[0]\nz = out", False),
        ("out = out[1], 2\ny = out[0]", False),
        ("y = h", False),
    ],
)
def test_literal_indices(code: str, picks: bool) -> None:
    """Anything else may be another item, or another tuple, when the branch runs."""
    assert picks_by_literals(Branch(ast.parse(code).body, None, frozenset()), "out") is picks
