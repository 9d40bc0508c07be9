"""What entries ask of autograd while nothing is differentiated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.recording.gradients import GRADIENT


def recorded(call: object) -> engine.Graph:
    """Record an entry that is given the network."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return engine.trace(net, torch.zeros(2, 3), entries={"step": engine.Entry(call, (net, torch.ones(2, 3)))})


def test_backward_makes_an_output() -> None:
    """In all of its forms; the parameters get no gradient."""

    def step(net: nn.Module, x: Tensor) -> None:
        net(x).sum().backward()
        torch.autograd.backward(net(x).mean())

    graph = recorded(step)
    assert [graph.nodes[v.producer].op for v in graph.outputs] == ["linear", "sum", "mean"]


def test_gradients_follow_from_all_that_they_are_of() -> None:
    """`torch.autograd.grad` reads what it is given and what it is taken at, and its result goes on in the program."""

    def step(net: nn.Module, x: Tensor) -> Tensor:
        point = x.clone().requires_grad_(True)
        return torch.autograd.grad(net(point).sum(), point, create_graph=True)[0].norm()

    [node] = [node for node in recorded(step).nodes if node.op == GRADIENT]
    assert [v.shape for v in node.inputs] == [(), (2, 3)] and node.output.shape == (2, 3)


def test_gradients_of_parameters_are_read() -> None:
    """After a backward they follow from the loss and the parameter; clipping by torch is none of that."""

    def step(net: nn.Module, x: Tensor) -> Tensor:
        assert net[0].weight.grad is None
        net(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        return net[2].weight.grad.mean()

    [node] = [node for node in recorded(step).nodes if node.op == GRADIENT]
    assert [v.name for v in node.inputs if v.stored] == ["2.weight"]


def test_the_reason_of_what_code_takes_gradients_of() -> None:
    """It names the entry and the line."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 5)

    def step() -> Tensor:
        (gradient,) = torch.autograd.grad(net(x).sum(), [net[0].weight], create_graph=True)
        return gradient.norm()

    graph = engine.trace(net, x, entries={"step": engine.Entry(step, training=True)})
    group = engine.dependency_groups(net, x, graph=graph)[0]
    assert str(group.reason).startswith("autograd::grad has no rule (autograd::grad of 'step' (")


def test_calls_of_entries_name_the_entry() -> None:
    """As far as no module makes them."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = engine.trace(net, torch.randn(3, 5), entries={"penalty": lambda: net[0].weight.abs().sum()})
    shown = [repr(node).partition(" (")[0] for node in graph.nodes]
    assert shown == ["linear in '0'", "relu in '1'", "linear in '2'", "abs of 'penalty'", "sum of 'penalty'"]
