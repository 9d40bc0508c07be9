"""The brute force finds wrong labels, wrong constants and wrong use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.checking.isolated import calls_of
from engine.checking.validation import check_call
from engine.rule import Registry
from tests.engine.nets import Net


def rules_with(op: str, **parts: Any) -> Registry:
    """The registry with parts of one op's rule exchanged."""
    others = (replace(r, ops=tuple(o for o in r.ops if o != op)) for r in engine.RULES.distinct())
    return Registry([*others, replace(engine.RULES[op], ops=(op,), **parts)])


def check(op: str, f: Callable[[Tensor], Tensor], rules: Registry) -> None:
    """Try the calls of one op in a function of a convolution."""
    net = Net(lambda m, x: f(m.stem(x)), stem=nn.Conv2d(3, 8, 1)).double().eval()
    generator = torch.Generator().manual_seed(0)
    for call in calls_of(net, torch.randn(2, 3, 5, 5, dtype=torch.float64), [op]):
        check_call(call, rules, generator)


def test_wrong_labels() -> None:
    """A flip that is said to leave entries where they are."""
    wrong = rules_with("flip", labels=lambda node, labels: labels.pass_on(*node.inputs, node.output))
    with pytest.raises(engine.errors.RuleError, match=r"labels of flip.*cut along self"):
        check("flip", lambda x: x.flip(1), wrong)


def test_labels_that_raise() -> None:
    """A rule that relies on slots along an axis that may have none."""

    def channels(node: Any, labels: Any) -> None:
        labels.add(node.output, labels.along(node.inputs[0], 1).view(1, -1, 1, 1))

    wrong = rules_with("relu", labels=channels)
    with pytest.raises(engine.errors.RuleError, match="they raise"):
        check("relu", torch.relu, wrong)


def test_wrong_constants() -> None:
    """A cosine that is said to keep zero."""
    wrong = rules_with("cos", constants=lambda node, constants: [constants[node.inputs[0]]])
    with pytest.raises(engine.errors.RuleError, match="constants of cos"):
        check("cos", torch.cos, wrong)


def test_wrong_use() -> None:
    """A flip that is said to use the entries at their own places."""
    wrong = rules_with("flip", use=lambda node, use: use.add(node.inputs[0], use[node.output]))
    with pytest.raises(engine.errors.RuleError, match="use of flip"):
        check("flip", lambda x: x.flip(1), wrong)
