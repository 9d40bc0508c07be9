"""Calls that leave something behind are run twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.running.evaluation import evaluating
from engine.verification.remains import Remains, writes
from tests.engine.nets import Net, dead


def _attribute(model: Any) -> None:
    model.flag = True


def _nested(model: Any) -> None:
    model.items["a"].append(1)


def _table(model: Any) -> None:
    model._buffers["late"] = torch.zeros(1)


def _nothing(model: Any) -> None:
    model.flag = False


@pytest.mark.parametrize(
    ("change", "differs"), [(_attribute, True), (_nested, True), (_table, True), (_nothing, False)]
)
def test_what_differs(change: Any, differs: bool) -> None:
    """Attributes, tables of modules, and what lies in containers; the same value again is not a change."""
    model: Any = nn.ReLU()
    model.flag, model.items = False, {"a": []}
    with evaluating(model) as state:
        remains = Remains(model, state)
        change(model)
        assert remains.differ() is differs


def test_what_the_recording_says() -> None:
    """A buffer that is written in place is not another object."""
    model = Net(lambda m, x: m.total.add_(m.stem(x).sum()), stem=nn.Linear(3, 4))
    model.register_buffer("total", torch.zeros(()))
    assert writes(engine.trace(model, torch.zeros(2, 3)))


def test_two_calls_are_run_where_one_leaves_something() -> None:
    """And no more than one elsewhere."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x).relu()
        if counts:
            m.calls = getattr(m, "calls", 0) + 1
        return m.head(y)

    for counts in (False, True):
        model = Net(forward, stem=nn.Linear(3, 6), head=nn.Linear(6, 2))
        speedup = engine.ModelSpeedup(model, torch.rand(2, 3), dead(model, {"stem": [0]}), confidence=3)
        speedup.speedup_model()
        assert (
            speedup.certificate.shapes.count((2, 3)) == counts
            and speedup.certificate.verified
            and not hasattr(model, "calls")
        )
