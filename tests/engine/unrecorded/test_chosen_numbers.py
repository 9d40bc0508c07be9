"""Numbers that code which did not run would choose otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine


class Net(nn.Module):
    """Scales features by a number, which is another one for one size."""

    number: Callable[[int], float]

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        scale = self.number(len(x))
        return self.leave(self.enter(x) + scale)  # type: ignore[no-any-return]


def _expression(net: Any, size: int) -> float:
    return 2.0 if size == 77 else 0.5


def _statement(net: Any, size: int) -> float:
    number = 0.5
    if size == 77:
        number = 2.0
    return number


def _early(net: Any, size: int) -> float:
    if size == 77:
        return 2.0
    return 0.5


@pytest.mark.parametrize("number", [_expression, _statement, _early], ids=lambda number: number.__name__)
def test_numbers_for_one_size(number: Callable[..., float]) -> None:
    """The op that gets them may get any other."""
    net = type("Scales", (Net,), {"__module__": __name__, "number": number})()
    graph = engine.trace(net, torch.zeros(2, 3))
    [add] = [node for node in graph.nodes if node.op == "add" and node.path == "eval"][:1]
    assert 0.5 in graph.uncertain.get(add.index, ())


class Collects(nn.Module):
    """Collects features on demand, and filters what it returns by whether it is None."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, collect: Any = None, as_tuple: Any = None) -> Any:
        """Return scores, with the features if wanted."""
        kept = () if collect else None
        h = self.inner(self.enter(x).relu()).relu()
        y = self.leave(h)
        if as_tuple:
            return tuple(value for value in [y, kept] if value is not None)
        return {"y": y, "kept": kept}


def test_numbers_in_code_that_did_not_run() -> None:
    """Comparisons in a comprehension that did not run are left to the analysis of the branch around it."""
    net, x = Collects(), torch.zeros(2, 3)
    free = {layer for group in engine.dependency_groups(net, x) if group.reason is None for layer in group.layers}
    assert free >= {"enter", "inner"}


class Causal(nn.Module):
    """Attends to earlier tokens only, or to all, as another part of the code decides."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.leave = 2, nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        is_causal = True
        if len(x) == 77:
            is_causal = False
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        tokens = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.leave(tokens.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_flag_by_which_positions_see_each_other() -> None:
    """All channels of a head go through the op alike."""
    groups = engine.dependency_groups(Causal(), torch.zeros(2, 3, 4))
    assert any(group.reason is None for group in groups)
