"""What is known of an op whatever the numbers are that it was given after a read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.analysis.uncertain import amounts
from engine.analysis.use import Use
from engine.program.stored import stored_tensors
from engine.removal.propagate import propagate
from tests.engine.nets import Net


def traced(step: Callable[[Tensor, float], Tensor]) -> tuple[nn.Module, Any]:
    """Return a network whose first two channels are 0 and 1, and its graph."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return step(m.layer(x), x.max().item())

    net = Net(forward, layer=nn.Linear(3, 4)).double()
    with torch.no_grad():
        net.layer.weight[:2] = 0
        net.layer.bias[:2] = torch.tensor([0.0, 1.0])
    return net, engine.trace(net, torch.full((2, 3), 0.75, dtype=torch.float64))


SCALES = torch.tensor([0.0, 0.0, 1.5, 2.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda h, n: h * n, [True, False]),
        (lambda h, n: h + n, [False, False]),
        (lambda h, n: F.leaky_relu(h, n), [True, True]),
        (lambda h, n: h.clamp(max=n), [False, False]),
        (lambda h, n: h * 0.75, [True, True]),
        (lambda h, n: torch.maximum(h, torch.full_like(h, n)), [False, False]),
        (lambda h, n: F.batch_norm(h, 0 * SCALES, 1 + SCALES, SCALES, 0 * SCALES, eps=n), [True, True]),
    ],
    ids=["times", "plus", "slope", "limit", "a literal", "filled", "eps"],
)
def test_what_holds_for_all_numbers(step: Callable[[Tensor, float], Tensor], expected: list[bool]) -> None:
    """Zero times anything is zero, and a slope is none for what is positive."""
    net, graph = traced(step)
    constants = Constants(graph, engine.RULES, stored_tensors(net))
    row = constants.along(graph.nodes[-1].output, 1)
    assert (~row[:2].isnan()).tolist() == expected and row[2:].isnan().all()


@pytest.mark.parametrize(("dim", "frozen"), [(0, False), (1, True)], ids=["batch", "channels"])
def test_amounts_hold_their_dimension(dim: int, frozen: bool) -> None:
    """Channels of which a data-dependent number is taken stay; a slice of the batch holds none."""
    net, graph = traced(lambda h, n: (h[: int(n) + 1] if dim == 0 else h[:, : int(n) + 1]).tanh().sum(1))
    nodes = [n for n in graph.nodes if amounts(n, graph.uncertain.get(n.index, ()))]
    structure = propagate(graph, engine.RULES)
    assert nodes
    for node in nodes:
        row = structure.along(node.inputs[0], 1)
        assert row is not None and bool(structure.slots.frozen(row).all()) == frozen


VIEWS: dict[str, tuple[Callable[[Tensor, int], Tensor], bool]] = {
    "rows": (lambda h, n: h.view(n, -1, h.shape[1]).tanh().sum(0), False),
    "both ends": (lambda h, n: h.reshape(h.shape[0], n, n, h.shape[1]).tanh().sum((1, 2)), False),
    "after a transposition": (lambda h, n: h.t().reshape(h.shape[1], n, -1).tanh().sum((1, 2))[None], False),
    "one that is split": (lambda h, n: h.view(h.shape[0], n, -1).tanh().sum(1), True),
    "another tensor's": (lambda h, n: h.reshape(h.shape[1], n, -1).tanh().sum((0, 1))[None], True),
}


@pytest.mark.parametrize(("view", "frozen"), VIEWS.values(), ids=VIEWS.keys())
def test_views_whose_ends_are_the_same(view: Callable[[Tensor, int], Tensor], frozen: bool) -> None:
    """A number in the middle takes no part of a dimension whose size the code passes on."""
    net, graph = traced(lambda h, n: view(h, int(n) + 1)[:, 1:])
    [node] = [n for n in graph.nodes if n.op in ("view", "reshape")]
    structure, constants = propagate(graph, engine.RULES), Constants(graph, engine.RULES, stored_tensors(net))
    row = structure.along(graph.nodes[0].output, 1)
    assert row is not None and bool(structure.slots.frozen(row).all()) == frozen
    assert bool(constants[node.output].isnan().all()) == frozen
    used = Use(structure, constants).along(graph.nodes[0].output, 1)
    assert used.tolist() == [frozen, True, True, True]


class Mixing(nn.Module):
    """Trains on mixtures of samples (Zhang et al., mixup, ICLR 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.first(x).relu())  # type: ignore[no-any-return]

    def step(self, x: Tensor) -> Tensor:
        """Return those of a mixture, with a number that was read and an order that was drawn."""
        share, order = float(torch.rand(()).item()), torch.randperm(len(x))
        return self(share * x + (1 - share) * x[order])  # type: ignore[no-any-return]


def test_what_is_drawn_after_a_read_reads_nothing() -> None:
    """An op without inputs whose size may follow from data; the channels of the network go."""
    net, x = Mixing().double(), torch.randn(4, 3, dtype=torch.float64)
    mask = (torch.arange(8) % 2).double()
    masks = {"first": {"weight": mask[:, None].expand(8, 3), "bias": mask}}
    graph = engine.trace(net, x, entries={"step": engine.Entry(net.step, (x,), training=True)})
    repaired = engine.fix_mask_conflict(masks, net, x, graph=graph)
    speedup = engine.ModelSpeedup(net, x, repaired, graph=graph)
    speedup.speedup_model()
    assert net.first.out_features == 4 and "step" in speedup.certificate.entries


class Heads(nn.Module):
    """Attention behind a read, as in transformers: the shape of the heads is put together first."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out, self.width = nn.Linear(3, 12), nn.Linear(12, 2), 4

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        scale = float(x.abs().max())
        shape = (*x.shape[:-1], -1, self.width)
        heads = self.query(x).view(shape).tanh() * scale
        return self.out(heads.reshape(*x.shape[:-1], -1))  # type: ignore[no-any-return]


def test_fixed_numbers_in_a_shape_put_together_before() -> None:
    """They are no amounts that follow from the read."""
    graph = engine.trace(Heads(), torch.rand(2, 5, 3))
    assert not [n for n in graph.nodes if amounts(n, graph.uncertain.get(n.index, ()))]
