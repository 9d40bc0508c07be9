"""Whatever somebody keeps of a run is an output of it, wherever it is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.program.graph import Graph
from engine.running.escapes import outliving_tensors

KEPT: list[Any] = []


class Net(nn.Module):
    """Hands what it computes inside to a function, and what that returns to the caller."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.keep = nn.Linear(3, 6), nn.Linear(6, 2), keep

    def forward(self, x: Tensor) -> Any:
        """Return the output, and what the function gave."""
        hidden = self.body(x)
        kept = self.keep(self, hidden)
        out = self.head(hidden.sigmoid())
        return out if kept is None else (out, kept)


def traced(keep: Callable[[Any, Tensor], Any]) -> Graph:
    """Return the graph of a network that hands its features to ``keep``."""
    return engine.trace(Net(keep), torch.zeros(4, 3))


@pytest.mark.parametrize(
    "keep",
    [
        lambda net, h: SimpleNamespace(h=h),
        lambda net, h: {h: 1}.keys(),
        lambda net, h: (part for part in [h]),
        lambda net, h: lambda: h,
        lambda net, h: KEPT.append(h),
        lambda net, h: setattr(net, "last", h),
    ],
    ids=["namespace", "a view of keys", "generator", "closure", "global", "attribute"],
)
def test_what_is_kept_is_an_output(keep: Callable[[Any, Tensor], Any]) -> None:
    """The layer inside puts out a result, with the reason why."""
    graph = traced(keep)
    KEPT.clear()
    [value] = [node.output for node in graph.nodes if node.module == "body"]
    assert any(value is output for output in graph.outputs)
    assert "outlives the call" in graph.exits[value.index] and "body" in graph.exits[value.index]


@pytest.mark.parametrize(
    "drop",
    [
        lambda net, h: None,
        lambda net, h: weakref.ref(h) and None,
        lambda net, h: (lambda cycle: cycle.append(cycle))([h]),
    ],
    ids=["nothing", "a weak reference", "a cycle"],
)
def test_what_nobody_keeps_is_none(drop: Callable[[Any, Tensor], Any]) -> None:
    """A cycle that the forward left behind keeps nothing."""
    graph = traced(drop)
    assert not graph.exits and len(graph.outputs) == 1


def test_the_value_at_the_end_of_the_call() -> None:
    """What is written to after it was stored is the output as it is then."""

    def keep(net: Any, hidden: Tensor) -> None:
        net.last = hidden
        hidden.relu_()

    graph = traced(keep)
    [exit_] = graph.exits
    [relu] = [node for node in graph.nodes if node.op == "relu"]
    assert relu.output.index == exit_


def test_an_argument_that_is_written() -> None:
    """The caller sees it."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 6)

        def forward(self, x: Tensor, out: Tensor) -> None:
            out.copy_(self.body(x))

    graph = engine.trace(Writes(), (torch.zeros(4, 3), torch.zeros(4, 6)))
    [value] = graph.outputs
    assert "written" in graph.exits[value.index]


def test_cycles_are_looked_for_only_where_something_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary model pays for counting references, and for nothing else."""
    looked: list[int] = []
    monkeypatch.setattr(gc, "collect", looked.append)
    table = {id(t): t for t in [torch.zeros(1), torch.ones(1)]}
    assert not outliving_tensors(table, set()) and not looked
    held = next(iter(table.values()))
    assert outliving_tensors(table, {id(held)}) == [held] and not looked
    assert outliving_tensors(table, set()) == [held] and looked == [0]


def test_further_tables_of_the_caller() -> None:
    """A tensor may lie in more than one of them."""
    table = {id(t): t for t in [torch.zeros(1), torch.ones(1)]}
    again = dict(list(table.items())[:1])
    assert not outliving_tensors(table, set(), again)
    assert outliving_tensors(table, set()) == list(again.values())


def test_a_graph_that_waits_for_a_backward_pass_keeps_nothing() -> None:
    """Tensors that autograd saved are let go with the loss."""
    weight = torch.ones(2, requires_grad=True)
    table = {id(t): t for t in [weight * 2]}
    loss = sum(t * t for t in table.values()).sum()
    assert loss.requires_grad and not outliving_tensors(table, set())
