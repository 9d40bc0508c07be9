"""Calls of what a variable holds."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor, nn

from engine.flow.called_variables import held_calls, is_called
from engine.flow.choices import Choices


class Net(nn.Module):
    """Calls an item of a list, and passes a layer on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        steps: list[Any] = [self.one, torch.relu]
        for step in steps:
            x = step(x)
        return self.run(x, steps[0])

    def run(self, x: Tensor, layer: nn.Module) -> Tensor:
        """Return features behind a layer."""
        return layer(x).relu()  # type: ignore[no-any-return]


def test_calls_are_followed_into_functions() -> None:
    """In a loop, the modules are those of the list; of an argument, nobody knows all that it may hold."""
    net: Any = Net()
    calls = held_calls(net, Choices([net.forward], variables={Net.forward.__code__: {"steps"}}))
    own = {ast.unparse(call.node): call for call in calls}
    assert set(own) == {"step(x)", "layer(x)"}
    assert own["step(x)"].modules == [net.one] and own["step(x)"].is_complete
    assert own["layer(x)"].owner is net and not own["layer(x)"].is_complete


def test_a_variable_is_called_under_another_name() -> None:
    """What a call returns is not what is called."""
    tree = ast.parse("first, second = layers\ny = first(x)\nz = f(y)")
    assert is_called(tree, "layers") and not is_called(tree, "y") and not is_called(tree, "x")


def test_a_part_of_a_tensor_holds_nothing_to_call() -> None:
    """Two loops with the same variable: layers in one, their results in the other."""
    tree = ast.parse(
        "em = [e(x[:, i : i + 1]) * weights[:, i : i + 1] for i, e in enumerate(layers)]\ny = sum(e * e for e in em)"
    )
    assert is_called(tree, "layers") and not is_called(tree, "weights")
