"""Arguments of forward, and the functions that receive them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.flow.forward_arguments import ForwardArguments


class Part(nn.Module):
    """A part with an argument under another name."""

    def forward(self, x: Any, shuffle: bool = False, scale: float = 1.0) -> Any:
        """Return the input."""
        return x


class Net(nn.Module):
    """Passes a flag on."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Any, flag: bool = False, mask: Any = None) -> Any:
        """Return the input."""
        return self.part(x, flag)


def test_names_and_options() -> None:
    """Options are arguments without a tensor in the example; declared ones keep their value."""
    model = Net()
    arguments = ForwardArguments(model, (torch.zeros(1),), {"mask": torch.ones(1)})
    assert arguments.options_of(Net.forward.__code__) == {"flag"}
    assert arguments.options_of(Part.forward.__code__) == {"shuffle"}
    assert arguments.that_vary_in(Part.forward.__code__) == {"x", "flag", "mask", "shuffle"}
    declared = ForwardArguments(model, (torch.zeros(1),), {}, lambda name: name == "flag")
    assert declared.options_of(Net.forward.__code__) == {"mask"}


class Called(Net):
    """Has an argument of its own call alone."""

    def __call__(self, x: Any, extra: Any = None) -> Any:
        """Return the input."""
        return super().__call__(x) if extra is None else x


def test_arguments_of_the_modules_own_call() -> None:
    """They count, and so do those of forward, to which it may pass any."""
    arguments = ForwardArguments(Called(), (torch.zeros(1),), {})
    assert {"extra", "mask"} <= set(arguments.omitted_in(Called.__call__.__code__))
    assert "flag" in arguments.options_of(Net.forward.__code__)
    shuffled = ForwardArguments(Called(), (torch.zeros(1),), {"extra": 1})
    assert "flag" in shuffled.options_of(Net.forward.__code__)
