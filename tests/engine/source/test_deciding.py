"""Who decides which branch runs."""

from __future__ import annotations

import ast
import os

import pytest
import torch

from engine.source.deciding import Decider

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
    ],
)
def test_fixed(test: str, fixed: bool) -> None:
    """Attributes that nobody sets, and what the code itself passes."""
    tree = ast.parse(_FUNCTION).body[0]
    assert isinstance(tree, ast.FunctionDef)
    space = {"torch": torch, "os": os, "LIMIT": 1, "exists": exists, "counted": counted, "forever": forever}
    decider = Decider(tree, space, {"x", "flag"}, lambda name: name != "counter", lambda node: True)
    assert decider.fixed(ast.parse(test, mode="eval").body) is fixed
