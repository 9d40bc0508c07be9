"""The brute force finds what a rule freezes for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.checking.freed import Freed, freed
from engine.checking.isolated import calls_of
from engine.rule import Registry
from tests.engine.checking.test_validation import rules_with
from tests.engine.nets import Net


def check(op: str, f: Callable[[Tensor], Tensor], rules: Registry) -> list[Freed]:
    """Try the calls of one op in a function of a convolution."""
    net = Net(lambda m, x: f(m.stem(x)), stem=nn.Conv2d(3, 8, 1)).double().eval()
    calls = calls_of(net, torch.randn(2, 3, 5, 5, dtype=torch.float64), [op])
    return [found for call in calls for found in freed(call, rules, torch.Generator().manual_seed(0))]


def test_what_is_frozen_for_nothing() -> None:
    """A function of each entry whose rule freezes: all axes are named; the batch is none."""

    def frozen(node: Any, labels: Any) -> None:
        for value in (*node.inputs, *node.outputs):
            labels.freeze(value, "for no reason")

    found = check("relu", torch.relu, rules_with("relu", labels=frozen))
    assert {f.axes for f in found} == {"self -3", "self -2", "self -1"}
    assert {(f.zero, f.reason) for f in found} == {(False, "for no reason")}
    assert check("relu", torch.relu, engine.RULES) == []


def test_what_goes_only_where_it_is_zero() -> None:
    """A sum does without zeros; a softmax does not, nor does a largest entry."""

    def frozen(node: Any, labels: Any) -> None:
        labels.freeze(node.inputs[0], "for no reason")

    found = check("sum", lambda x: x.sum(1), rules_with("sum", labels=frozen))
    assert {(f.axes, f.zero) for f in found} == {("self -3", True), ("self -2", False), ("self -1", False)}
    assert check("softmax", lambda x: x.softmax(1), engine.RULES) == []
    assert check("amax", lambda x: x.amax(1), engine.RULES) == []


def test_blocks_that_only_go_together() -> None:
    """Four channels become one: no channel can go alone, but four in a row can."""

    def frozen(node: Any, labels: Any) -> None:
        labels.freeze(node.inputs[0], "for no reason")

    found = check("pixel_shuffle", lambda x: torch.pixel_shuffle(x, 2), rules_with("pixel_shuffle", labels=frozen))
    assert {f.axes for f in found} == {"self -3", "self -2", "self -1"}
