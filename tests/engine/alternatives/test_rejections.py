"""Tests of the sizes that are not tried, because the model has rejected others by the same decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import tracer


class _Checked(nn.Module):
    """Checks its inputs, and goes on."""

    def __init__(self, check: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.stem, self.check, self.side = nn.Conv2d(3, 4, 1), check, 8

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(self.check(x, self.side))
        return y


def _runs(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, ...]], set[str]]:
    """Return the sizes of the pictures that were tried, and the ops on other paths than the first."""
    tried: list[tuple[int, ...]] = []
    run = tracer._run

    def counted(recorder: Any, own: Any, opaque: Any, args: tuple[Tensor], *further: Any, **named: Any) -> None:
        tried.append(tuple(args[0].shape[2:]))
        run(recorder, own, opaque, args, *further, **named)

    monkeypatch.setattr(tracer, "_run", counted)
    graph = engine.trace(model, torch.zeros(2, 3, 8, 8), dynamic_dims=({2, 3},))
    return tried[1:], {node.op for node in graph.nodes if node.path == "other"}


def _equal(x: Tensor, side: int) -> Tensor:
    torch._assert(x.shape[2] == side, "the height")
    torch._assert(x.shape[3] == side, "the width")
    return x


def _either(x: Tensor, side: int) -> Tensor:
    if x.shape[2] != side or x.shape[3] != side:
        raise ValueError("the sides")
    return x


@pytest.mark.parametrize("check", [_equal, _either])
def test_one_size_is_enough_for_a_decision(
    check: Callable[[Tensor, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not fit for the height, one for the width; nine were tried without this."""
    assert _runs(_Checked(check), monkeypatch)[0] == [(16, 16), (8, 16)]


def _not_larger(x: Tensor, side: int) -> Tensor:
    if x.shape[2] > side:
        raise ValueError("too large")
    return x.relu() if x.shape[2] < side else x


def test_a_size_that_is_decided_otherwise_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes smaller pictures, and does something else with them."""
    tried, others = _runs(_Checked(_not_larger), monkeypatch)
    assert [height for height, _ in tried][:2] == [16, 5] and 9 not in {height for height, _ in tried}
    assert "relu" in others


def _laid_out(x: Tensor, side: int) -> Tensor:
    return x.view(2, 3, 9, 8).relu() if x.shape[2] > side else x


def _laid_out_or_refused(x: Tensor, side: int) -> Tensor:
    if x.shape[2] > side:
        try:
            x = x.view(2, 3, 9, 8)
        except RuntimeError:
            raise ValueError("it does not fit") from None
        return x.relu()
    return x


def _in_two_steps(x: Tensor, side: int) -> Tensor:
    if x.shape[2] > side:
        x = x[:, :, :, :8]
        if len(x.flatten(2).unbind(2)) != 72:
            raise ValueError("it does not fit")
        return x.relu()
    return x


def _by_remainder(x: Tensor, side: int) -> Tensor:
    if x.shape[2] > side and x.shape[2] % 9:
        raise ValueError("it does not fit")
    return x.relu() if x.shape[2] > side else x


@pytest.mark.parametrize("check", [_laid_out, _laid_out_or_refused, _in_two_steps, _by_remainder])
def test_what_else_decides_is_tried(check: Callable[[Tensor, int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that fails, what ops return, and another comparison tell of a size more than the decision before."""
    tried, others = _runs(_Checked(check), monkeypatch)
    assert {height for height, _ in tried} >= {16, 9} and "relu" in others
