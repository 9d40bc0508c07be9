"""Calls that get a number which code chooses."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor, nn

from engine.flow.choices import Choices
from engine.flow.chosen_calls import chosen_calls
from engine.source.function_text import syntax_of


class Net(nn.Module):
    """Passes a number on."""

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        count = 2 if len(x) > 9 else 1
        y = x * self.scaled(count)
        for _ in range(count):
            y = torch.relu(y)
        return [x, y][count]

    def scaled(self, number: int) -> float:
        """Return a number that follows from another one."""
        return number / 2 + float(torch.ones(1) * number)


def test_numbers_are_followed_into_functions_and_back() -> None:
    """Lists and loops are noted as such; features are no numbers, nor is what is computed from them."""
    tree = syntax_of(Net.forward.__code__)
    assert tree is not None
    choice = next(n for n in ast.walk(tree) if isinstance(n, ast.IfExp))
    net = Net()
    calls = chosen_calls(net, Choices([net.forward, net.scaled], expressions=frozenset([choice.body])))
    start = Net.forward.__code__.co_firstlineno
    by_line = {line - start: picks for ((line, _), _), picks in calls[Net.forward.__code__].items()}
    assert by_line == {3: False, 4: True, 6: True}
    assert not any(calls[Net.scaled.__code__].values()) and len(calls[Net.scaled.__code__]) == 3


class Checkpointed(nn.Module):
    """Wraps its own call, as modules do that recompute their features in the backward pass."""

    checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)

    def __call__(self, x: Tensor, **kwargs: Any) -> Any:
        """Run forward, without a cache where features are recomputed."""
        if self.checkpointing and self.training:
            kwargs["cached"] = False
        return super().__call__(x, **kwargs)

    def forward(self, x: Tensor, cached: bool = True) -> Any:
        """Return scores."""
        return self.leave(self.enter(x).relu())


def test_a_call_of_a_module_does_something_with_any_number() -> None:
    """Unlike a method of a tensor, such as ``x.to(dtype)``, it returns nothing that it receives."""
    code = Checkpointed.__call__.__code__
    calls = chosen_calls(Checkpointed(), Choices(variables={code: {"kwargs"}}, functions=[Checkpointed.__call__]))
    assert list(calls[code].values()) == [False]
