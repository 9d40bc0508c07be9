"""Traps: two conditions that matter only together, each of another kind."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.recording.combinations import Combinations
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

FAST = False


class _Net(nn.Module):
    """Layers, of which conditions pick some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same = nn.Linear(5, 6), nn.Linear(6, 6)
        self.usual, self.rare = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.fast, self.steps = False, 0

    def accelerate(self, fast: bool) -> None:
        """Take the fast path."""
        self.fast = fast

    def advance(self) -> None:
        """Count a step."""
        self.steps += 1


CONDITIONS: dict[str, Callable[..., bool]] = {
    "an argument": lambda net, x, refine: refine,
    "an attribute": lambda net, x, refine: net.fast,
    "a counter": lambda net, x, refine: net.steps > 3,
    "a global": lambda net, x, refine: FAST,
    "the environment": lambda net, x, refine: os.environ.get("TRAP_COMBINED") == "1",
    "a size": lambda net, x, refine: x.shape[1] > 7,
    "a batch": lambda net, x, refine: x.shape[0] % 2 == 1,
    "a decision on data": lambda net, x, refine: float(x.mean()) > 5,
    "a mode": lambda net, x, refine: net.training,
    "gradients": lambda net, x, refine: torch.is_grad_enabled(),
}


def _item(net: Any, h: Tensor, one: Callable[[], bool], other: Callable[[], bool]) -> Tensor:
    return (net.usual, net.rare)[int(one() and other())](h)


def _loop(net: Any, h: Tensor, one: Callable[[], bool], other: Callable[[], bool]) -> Tensor:
    for layer in (net.rare, net.usual):
        y = layer(h)
        if one() and other():
            break
    return y


def _skipped(net: Any, h: Tensor, one: Callable[[], bool], other: Callable[[], bool]) -> Tensor:
    y = h if one() and other() else net.same(h)
    y = net.usual(y)
    return y


def _returned(net: Any, h: Tensor, one: Callable[[], bool], other: Callable[[], bool]) -> Tensor:
    if one() and other():
        return net.last(net.rare(h).tanh())
    return net.last(net.usual(h))


def _nested(net: Any, h: Tensor, one: Callable[[], bool], other: Callable[[], bool]) -> Tensor:
    if one():
        y = net.rare(h) if other() else net.last(h)
    else:
        y = net.usual(h)
    return y


BODIES = {
    "an item": _item,
    "a loop": _loop,
    "a layer skipped": _skipped,
    "another result": _returned,
    "a branch inside": _nested,
}


def _combined(body: str, one: str, other: str) -> type[_Net]:
    class Combined(_Net):
        def forward(self, x: Tensor, refine: bool = False) -> Tensor:
            first, second = CONDITIONS[one], CONDITIONS[other]
            h = self.stem(x).relu()
            y = BODIES[body](self, h, lambda: first(self, x, refine), lambda: second(self, x, refine))
            return self.head(y.relu())

    return Combined


def _under(*conditions: str) -> Use:
    """Return a use that calls the network where some conditions hold."""

    def use(net: Any) -> Any:
        x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x = torch.cat([x, x], 1) if "a size" in conditions else x
        x = torch.cat([x, x[:1]]) if "a batch" in conditions else x
        x = x + 10 if "a decision on data" in conditions else x
        net.accelerate("an attribute" in conditions)
        net.steps = 5 if "a counter" in conditions else 0
        globals()["FAST"] = "a global" in conditions
        if "the environment" in conditions:
            os.environ["TRAP_COMBINED"] = "1"
        try:
            with torch.set_grad_enabled("gradients" in conditions):
                return net.train("a mode" in conditions)(x, refine="an argument" in conditions).detach()
        finally:
            globals()["FAST"] = False
            os.environ.pop("TRAP_COMBINED", None)
            net.eval()

    return use


def _trap(body: str, one: str, other: str) -> Trap:
    return Trap(
        name=f"{one} and {other}, {body}",
        source="if self.training and targets is not None; if return_features and x.shape[1] > n",
        make=_combined(body, one, other),
        example=lambda net: torch.zeros(2, 6, 5, dtype=torch.float64),
        uses=[_under(), _under(one), _under(other), _under(one, other)],
        seeds=(0,),
    )


TRAPS = [
    _trap(list(BODIES)[at % len(BODIES)], one, other)
    for at, (one, other) in enumerate(itertools.permutations(CONDITIONS, 2))
]


def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Combinations, "record", lambda self, in_train_mode, ops: [])


ABLATIONS = [
    Ablation(
        "conditions that matter only together are followed", _alone, next(str(t) for t in TRAPS if "an item" in t.name)
    )
]
