"""Who decides which branch runs."""

from __future__ import annotations

import ast
import functools
import os

import pytest
import torch

from engine.source.deciding import Decider, attribute_code, is_fixed_property

_FUNCTION = """
def forward(self, x, flag=False, inner=None):
    mode = flag
    other = self.width * 2
"""


def exists(value: object) -> bool:
    """Whether a value is there, in a function of its own."""
    return value is not None


def counted(value: object) -> bool:
    """Whether a value is there, and a count that changes."""
    CALLS.append(value)
    return len(CALLS) > 3


def forever(value: object) -> bool:
    """A function that calls itself."""
    return forever(value)


CALLS: list[object] = []


@pytest.mark.parametrize(
    ("test", "fixed"),
    [
        ("self.width > 3", True),
        ("self.counter > 3", False),
        ("flag", False),
        ("mode", False),
        ("other > 2", True),
        ("inner is None", True),
        ("torch.jit.is_scripting()", True),
        ("torchvision._is_tracing()", True),
        ("os.environ.get('A')", False),
        ("LIMIT > 2", False),
        ("x.requires_grad", False),
        ("hasattr(self, 'adapter')", True),
        ("isinstance(inner, torch.Tensor)", True),
        ("exists(inner)", True),
        ("not exists(value=inner)", True),
        ("exists(flag)", False),
        ("exists(*inner)", False),
        ("counted(inner)", False),
        ("forever(inner)", False),
        ("self.gate.mode > 3", False),
        ("self.gate.width > 3", True),
        ("self.gates[0].mode > 3", False),
        ("getattr(self.gates[-1], 'mode', 1)", False),
        ("any(gate.mode for gate in self.gates)", False),
        ("other.mode", False),
        ("sum(self.sizes.copy()) > 0", True),
        ("inner.lower() == 'a'", True),
        ("flag.lower() == 'a'", False),
        ("self.counter.startswith('a')", False),
        ("other.counter", True),
        ("self.counter", False),
        ("callable(self.counter)", False),
        ("isinstance(self.gate.mode, int)", False),
        ("isinstance(self.gate.width, int)", True),
    ],
)
def test_fixed(test: str, fixed: bool) -> None:
    """Attributes that nobody sets, and what the code itself passes."""
    tree = ast.parse(_FUNCTION).body[0]
    assert isinstance(tree, ast.FunctionDef)
    space = {"torch": torch, "os": os, "LIMIT": 1, "exists": exists, "counted": counted, "forever": forever}
    unsettled = {"counter", "gate.mode", "*.mode"}
    decider = Decider(tree, space, {"x", "flag"}, lambda path: path not in unsettled, lambda node: True, "self")
    assert decider.fixed(ast.parse(test, mode="eval").body) is fixed


_IN_A_ROW = """
def forward(self, x, flag=False, size=None):
    skip = x
    size = size or flag
    copy = skip
    skip = None
    for block in self.blocks:
        if block.wide:
            x = block(x)
        if block.mode:
            x = block(x)
    if skip is not None:
        x = x + skip
    skip = copy
    if skip is not None:
        x = x + skip
    if size:
        x = x + 1
    flag = self.width
    if flag:
        x = x + 2
        flag = x.sum()
    flag = self.width
    while x.sum() > 0:
        if flag:
            x = x - 2
        flag = x
"""


def test_what_a_variable_holds_by_then() -> None:
    """Only what the last assignment on every way gave it, and what follows that; an item of a list is one of self's."""
    tree = ast.parse(_IN_A_ROW).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If)]
    decider = Decider(tree, {}, {"x", "flag"}, lambda path: path != "*.mode", lambda node: True, "self")
    fixed = {ast.get_source_segment(_IN_A_ROW, t) + f" {t.lineno}": decider.fixed(t) for t in tests}  # type: ignore[operator]
    assert fixed == {
        "block.wide 8": True,
        "block.mode 10": False,
        "skip is not None 12": True,
        "skip is not None 15": False,
        "size 17": False,
        "flag 20": True,
        "flag 25": False,
    }


class _Switched:
    """Properties of each kind."""

    width, counter = 4, 0

    @property
    def wide(self) -> bool:
        """What nobody sets."""
        return self.width > 3

    @functools.cached_property
    def late(self) -> bool:
        """What somebody sets."""
        return self.counter > 3

    @property
    def counted(self) -> bool:
        """More than what it returns."""
        CALLS.append(self)
        return self.width > 3


@pytest.mark.parametrize(("name", "fixed"), [("wide", True), ("late", False), ("counted", False)])
def test_properties(name: str, fixed: bool) -> None:
    """What a property returns, and nothing else that it does, is as fixed as what it reads."""
    function = attribute_code(_Switched, name)
    assert function is not None and is_fixed_property(function, lambda path: path != "counter") is fixed


def test_what_is_stored_has_no_code() -> None:
    """Attributes of the class, methods, and what torch looks up."""
    assert attribute_code(_Switched, "width") is None
    assert attribute_code(torch.nn.Linear, "weight") is None and attribute_code(torch.nn.Linear, "forward") is None
