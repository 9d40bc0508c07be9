"""The recorded program checks itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import engine
from engine.errors import RuleError, StaleGraphError, TraceError
from engine.program.graph import Node, Value, walk_values
from engine.rule import Rule
from tests.engine.nets import dead, image, plain


def test_values_in_nested_arguments_are_found_in_order() -> None:
    """Lists, tuples and mappings; anything else is skipped."""
    a, b, c = (Value(n, (1,), torch.float32) for n in range(3))
    assert list(walk_values({"x": [a, 3, (b,)], "y": c, "z": "text"})) == [a, b, c]


def test_a_recorded_graph_is_valid() -> None:
    """Made before used, listed at its own index, readable."""
    graph = engine.trace(plain(), image())
    graph.verify()
    assert [node.op for node in graph.nodes][:3] == ["conv2d", "batch_norm", "relu"]
    conv = graph.nodes[0]
    assert conv.output.ndim == 4 and not conv.output.stored and graph.stored["0.weight"].stored
    assert "conv2d in '0'" in repr(conv) and "0.weight" in repr(graph.stored["0.weight"])


def test_a_graph_that_reads_what_is_not_made_is_refused() -> None:
    """With the node named."""
    graph = engine.trace(plain(), image())
    broken = dataclasses.replace(graph, nodes=(graph.nodes[1], *graph.nodes))
    with pytest.raises(TraceError, match="batch_norm in '1'"):
        broken.verify()
    with pytest.raises(TraceError, match="another index"):
        dataclasses.replace(graph, values=graph.values[::-1]).verify()


def test_users_of_values() -> None:
    """Every node is listed under each value that it reads."""
    graph = engine.trace(plain(), image())
    users = graph.users()
    assert users[graph.inputs[0].index] == [graph.nodes[0]]
    assert users[graph.nodes[0].output.index] == [graph.nodes[1]]


def test_what_nobody_reads() -> None:
    """A chain that ends nowhere is unread, what is written to a buffer is not."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mean().exp()
            self.last.copy_(x.amax(0))
            return x.tanh()

    graph = engine.trace(Odd(), torch.rand(2, 3))
    assert [node.op for node in graph.nodes if graph.unread(node)] == ["mean", "exp"]


@pytest.mark.parametrize("call", ["count", "groups", "repair", "speedup", "dependency", "unsafe"])
def test_a_stale_graph_is_refused(call: str) -> None:
    """After a compaction the old graph names the parameter that has changed; the model is as it was."""
    model = plain()
    graph = engine.trace(model, image())
    engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1]}, bias=True)).speedup_model()
    calls = {
        "count": lambda: engine.count_flops_params(model, image(), verbose=False, graph=graph),
        "groups": lambda: engine.dependency_groups(model, image(), graph=graph),
        "repair": lambda: engine.fix_mask_conflict({}, model, image(), graph=graph),
        "speedup": lambda: engine.ModelSpeedup(model, image(), {}, graph=graph).speedup_model(),
        "dependency": lambda: engine.ChannelDependency(model, image(), graph=graph),
        "unsafe": lambda: engine.not_safe_to_prune(model, image(), graph=graph),
    }
    with pytest.raises(
        StaleGraphError, match=r"'0\.weight' had shape \(6, 3, 3, 3\); it has shape \(\d, 3, 3, 3\) now"
    ):
        calls[call]()


def test_a_graph_of_another_model_is_refused() -> None:
    """A parameter that is gone is named."""
    graph = engine.trace(nn.Linear(3, 2), torch.ones(1, 3))
    with pytest.raises(StaleGraphError, match="'weight' had shape .* it is gone"):
        graph.check_fresh(nn.Sequential(nn.Linear(3, 2)))


def test_a_rule_that_fails_is_named_with_the_call() -> None:
    """Whatever it raises: a rule may be the user's."""

    def labels(node: Node, labels: object) -> None:
        raise KeyError("size")

    rules = engine.RULES.__class__(rule for rule in engine.RULES.distinct() if "relu" not in rule.ops)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(RuleError, match=r"The rule of 'relu' fails on relu in '1'.*KeyError: 'size'.*`opaque`"):
        engine.dependency_groups(net, torch.zeros(1, 3, 8, 8), rules=rules + [Rule(("relu",), labels)])
