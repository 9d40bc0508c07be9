"""What is noted while a module runs that is not looked into, and what the recorder makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import TraceError
from engine.running.opaque_modules import OpaqueCall, is_kind
from tests.engine.nets import Net, image, snapshot, unchanged


def traced(forward: Any, **parts: nn.Module) -> engine.Graph:
    """Record a net whose module ``own`` is opaque; it stays as it was."""
    model = Net(forward, **parts).double()
    before = snapshot(model)
    graph = engine.trace(model, image(), opaque=("own",))
    assert unchanged(model, before) and graph.opaque == ("own",)
    return graph


def own(function: Any) -> nn.Module:
    """A module with two parameters, one of them unused."""
    return Net(function, scale=nn.Conv2d(3, 3, 1, groups=3), unused=nn.Linear(1, 1))


def test_a_module_is_one_node() -> None:
    """It reads its inputs and all its parameters, and what happens inside leaves no node."""
    graph = traced(lambda m, x: torch.relu(m.own(x * 2)), own=own(lambda m, x: torch.tanh(m.scale(x) + 1)))
    assert [n.op for n in graph.nodes] == ["mul", "engine::module", "relu"]
    names = [v.name for v in graph.nodes[1].inputs[1:]]
    assert sorted(names) == [f"own.{part}.{key}" for part in ("scale", "unused") for key in ("bias", "weight")]


def test_a_write_to_the_input_is_seen() -> None:
    """What reads the input afterwards reads what the module left there."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = x * 1
        y = m.own(x)
        return x + y

    graph = traced(forward, own=own(lambda m, x: x.relu_()))
    module, add = graph.nodes[1:]
    assert module.op == "engine::module" and add.inputs[0].producer == add.inputs[1].producer == module.index


def test_what_it_reads_besides_its_inputs_is_an_input_too() -> None:
    """A feature that is kept elsewhere."""
    kept: dict[str, Tensor] = {}

    def forward(m: Net, x: Tensor) -> Tensor:
        kept["x"] = x * 3
        return m.own(x)

    graph = traced(forward, own=own(lambda m, x: x + kept["x"]))
    assert graph.nodes[0].output in graph.nodes[1].inputs


def test_what_it_writes_to_besides_is_an_output_too() -> None:
    """Then nothing of it can shrink."""
    kept: dict[str, Tensor] = {}

    def inside(m: Net, x: Tensor) -> Tensor:
        kept["x"].mul_(2)
        return x + 1

    def forward(m: Net, x: Tensor) -> Tensor:
        kept["x"] = x * 1
        return m.own(x) + kept["x"]

    graph = traced(forward, own=own(inside))
    assert set(graph.nodes[-1].inputs) == set(graph.nodes[1].outputs) and graph.nodes[1].args["results"] == (0, 0)


def test_a_side_door_is_an_error() -> None:
    """A tensor that leaves other than as an output."""
    kept: dict[str, Tensor] = {}

    def inside(m: Net, x: Tensor) -> Tensor:
        kept["y"] = x * 2
        return x + 1

    with pytest.raises(TraceError, match="did not return"):
        traced(lambda m, x: m.own(x) + kept["y"], own=own(inside))


def test_a_view_of_what_was_written_is_an_error() -> None:
    """It would be taken for the whole."""
    with pytest.raises(TraceError, match="returns a view of what it writes to"):
        traced(lambda m, x: m.own(x * 1), own=own(lambda m, x: x.relu_()[:, :1]))


def test_what_a_module_raises_arrives() -> None:
    """As the cause of the error, also from an opaque module."""

    def broken(m: Net, x: Tensor) -> Tensor:
        raise ValueError("not today")

    with pytest.raises(TraceError, match="not today"):
        traced(lambda m, x: m.own(x), own=own(broken))


def test_without_opaque_modules_nothing_differs() -> None:
    """The ops inside are recorded."""
    model = Net(lambda m, x: m.own(x), own=own(lambda m, x: torch.tanh(m.scale(x))))
    assert [n.op for n in engine.trace(model.double(), image()).nodes] == ["conv2d", "tanh"]


def test_the_outermost_call_ends_it() -> None:
    """Of a module that calls itself."""
    module = nn.ReLU()
    inside = OpaqueCall(module, depth=1)
    assert not inside.left(nn.ReLU()) and not inside.left(module) and inside.left(module)


def test_kinds_are_names_of_classes_and_bases() -> None:
    """But not ``object``."""
    assert is_kind(nn.Conv2d(1, 1, 1), "_ConvNd") and is_kind(nn.ReLU(), "Module") and not is_kind(nn.ReLU(), "object")
