"""What a condition follows from."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from torch import nn

from engine.flow.tested import ANY, attributes_tested, variables_tested

TREE: Any = ast.parse("""
def forward(self, x, other, key):
    mode = self.mode
    size = x.shape[0] + self.offset()

    def inner():
        return self.inner_flag

    if size > 3 and mode == other.kind: pass
    if inner() or getattr(self, "looked_up") or self.part.flag: pass
    if getattr(x, key): pass
    if other.width > 3 or x.ndim > 2 or other.dim() > 2 or torch.is_grad_enabled() or self.part(x).shape[1] > 3: pass
    if other.decides(x): pass
    if self.options.get("wide"): pass
""").body[0]
TESTS = [node.test for node in TREE.body if isinstance(node, ast.If)]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.part, self.options = 3, nn.Linear(2, 2), {"wide": True}

    def offset(self) -> int:
        """Read one attribute itself, and one by a method."""
        return self.first + self.second()  # type: ignore[no-any-return]

    def second(self) -> int:
        """Read another one, and start over."""
        return self.last + self.offset()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("index", "paths"),
    [
        (0, {"mode", f"{ANY}.kind", "offset", "first", "second", "last"}),
        (1, {"inner_flag", "looked_up", "part.flag", "part"}),
        (2, {ANY}),
        (3, {"part"}),
        (4, {ANY}),
        (5, {"options", "options.get()"}),
    ],
)
def test_the_attributes_of_a_condition(index: int, paths: set[str]) -> None:
    """Also those that methods and inner functions read; none that tensors have, and no numbers of other modules."""
    assert set(attributes_tested([TESTS[index]], TREE, "self", _Net())) == paths


def test_in_a_plain_function_no_variable_is_the_module() -> None:
    """All owners are unknown."""
    assert set(attributes_tested([TESTS[0]], TREE, None, _Net())) == {f"{ANY}.mode", f"{ANY}.kind", ANY}


def test_the_variables_of_a_condition() -> None:
    """And those that they are computed from."""
    assert variables_tested([TESTS[0]], TREE) == {"size", "mode", "other", "x", "self"}
