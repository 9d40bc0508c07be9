"""Which attributes of a model keep their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from engine.flow.mutability import Mutability


class Gate(nn.Module):
    """A part with a flag that its own code sets, one that code elsewhere sets, and one that nobody sets."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.outer, self.fixed, self.names = False, False, False, ["a"]

    def open(self) -> None:
        """Set a flag, and extend a list."""
        self.own = True
        self.names.append("b")

    @property
    def is_wide(self) -> bool:
        """Depends on a fixed flag."""
        return not self.fixed

    @property
    def is_open(self) -> bool:
        """Depends on a flag that is set."""
        return self.own


class Net(nn.Module):
    """Sets a flag of its part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.options = Gate(), SimpleNamespace(mode="fast")

    def start(self) -> None:
        """Set a flag of the part."""
        self.gate.outer = True

    def forward(self, x: Any) -> Any:
        """Return the input."""
        return x


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gate.fixed", True),
        ("gate.own", False),
        ("gate.outer", False),
        ("*.fixed", True),
        ("*.own", False),
        ("options.mode", True),
        ("gate.is_wide", True),
        ("gate.is_open", False),
        ("gate.open()", False),
    ],
)
def test_what_code_sets(path: str, expected: bool) -> None:
    """Code of the part, of the module that holds it, and what properties and methods read."""
    model = Net()
    assert Mutability(model, model.modules()).never_changed(model, path) is expected


def test_contents_of_a_container() -> None:
    """They may change although nobody assigns to the attribute."""
    model = Net()
    mutability = Mutability(model, model.modules())
    assert mutability.never_reassigned(model, "gate.names") and not mutability.never_changed(model, "gate.names")
