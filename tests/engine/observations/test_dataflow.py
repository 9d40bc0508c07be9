"""How recorded values flow through ops and modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.observations.dataflow import Dataflow
from engine.ops.calls import FUNCTIONS


class Net(nn.Module):
    """Two layers, the second in a container; the first one's output is added to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(3, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.body(self.enter(x) + torch.ones(8))  # type: ignore[no-any-return]


def test_what_enters_and_leaves_a_module() -> None:
    """Parameters are no inputs; what no op reads leaves it if nothing else does."""
    graph = engine.trace(Net(), torch.zeros(1, 3))
    dataflow = Dataflow(graph.nodes, graph.values, FUNCTIONS)
    added = next(node.outputs[0] for node in graph.nodes if node.op == "add")
    assert dataflow.boundary("body") == ([added], list(graph.outputs))
    assert dataflow.boundary("enter")[1] == [node.outputs[0] for node in graph.nodes if node.module == "enter"]


def test_channels_and_constants() -> None:
    """Channels lie along the dimension that all consumers contract; a captured tensor is a constant."""
    graph = engine.trace(Net(), torch.zeros(1, 3))
    dataflow = Dataflow(graph.nodes, graph.values, FUNCTIONS)
    added = next(node for node in graph.nodes if node.op == "add")
    assert [dataflow.channel_dim(value) for value in (added.inputs[0], added.outputs[0])] == [1, 1]
    assert [dataflow.is_constant(value) for value in added.inputs] == [False, True]
    assert dataflow.channel_dim(graph.outputs[0]) is None


class Block(nn.Module):
    """A layer whose activation all blocks share, so that the module has the name of the first one's."""

    act = nn.ReLU()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), Block.act

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        return self.act(self.layer(x))  # type: ignore[no-any-return]


def test_shared_modules_run_inside_of_their_callers() -> None:
    """What a block passes to the activation that all share does not leave the block, nor what it gets back."""
    graph = engine.trace(nn.Sequential(Block(), nn.Sequential(Block(), Block())), torch.zeros(1, 4))
    dataflow = Dataflow(graph.nodes, graph.values, FUNCTIONS)
    activations = [node for node in graph.nodes if node.op == "relu"]
    assert [node.module for node in activations] == ["0.act"] * 3
    assert [node.callers for node in activations] == [
        ("0", "0.act"),
        ("1", "1.0", "0.act"),
        ("1", "1.1", "0.act"),
    ]
    assert dataflow.boundary("1") == ([activations[0].output], list(graph.outputs))
    assert dataflow.boundary("1.0") == ([activations[0].output], [activations[1].output])
    assert len(dataflow.nodes_in("1")) == 4
