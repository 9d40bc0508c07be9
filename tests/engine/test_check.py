"""The self-check of rules finds wrong ones, and passes all that the engine ships."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.graph import Node
from engine.ops.shape import through
from engine.rule import Rule, Sample

SHIPPED = [rule for rule in engine.RULES.distinct() if any(True for _ in rule.samples())]


@pytest.mark.parametrize("rule", SHIPPED, ids=lambda rule: rule.ops[0])
def test_every_rule_that_is_shipped(rule: Rule) -> None:
    """Each passes on its own samples."""
    report = engine.check_rule(rule)
    assert all(error <= 1e-9 for *_, error in report.rows) and "Checked:" in str(report)


def test_wrong_constants_are_found() -> None:
    """A function that is said to put out zero where it puts out one half."""
    sigmoid = Sample(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sigmoid(), nn.Conv2d(6, 2, 1)), (2, 3, 4, 4), "sigmoid"
    )

    def zero(node: Node, constants: object) -> list[Tensor]:
        known = constants[node.inputs[0]]  # type: ignore[index]
        return [torch.where(known.isnan(), known, 0.0)]

    good = engine.RULES["sigmoid"]
    wrong = replace(good, ops=("sigmoid",), constants=zero, samples=lambda: [sigmoid])
    others = engine.Registry(
        replace(r, ops=tuple(op for op in r.ops if op != "sigmoid")) for r in engine.RULES.distinct()
    )
    with pytest.raises(engine.errors.RuleError, match="sigmoid"):
        engine.check_rule(wrong, rules=others)


def test_wrong_labels_are_found() -> None:
    """A flip that is said to leave channels where they are."""
    good = engine.RULES["flip"]
    flipped = through("flip", lambda x: x.flip(1))
    wrong = replace(
        good,
        ops=("flip",),
        labels=lambda node, labels: labels.pass_on(*node.inputs, node.output),
        samples=lambda: [flipped],
    )
    others = engine.Registry(replace(r, ops=tuple(op for op in r.ops if op != "flip")) for r in engine.RULES.distinct())
    with pytest.raises(engine.errors.RuleError, match="flip"):
        engine.check_rule(wrong, rules=others)


def test_what_is_left_whole_is_reported() -> None:
    """With the reason."""
    report = engine.check_rule(engine.RULES["softmax"], [through("softmax", lambda x: x.softmax(1))])
    assert "sums over it" in report.frozen["softmax"][0]


def test_a_rule_without_samples_is_an_error() -> None:
    """Nothing can be said about it."""
    with pytest.raises(engine.errors.RuleError, match="no samples"):
        engine.check_rule(engine.RULES["softmax"])
