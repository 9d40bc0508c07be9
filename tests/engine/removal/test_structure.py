"""The structure of a model: what a removal on trial shows to go wrong is frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.removal.structure import readers_of_zeros, structure_for, structure_of
from tests.engine.exactness import randomised
from tests.engine.nets import Net, image, plain


def centred() -> nn.Module:
    """Two stems; behind the second one the sum of all channels is taken from each before they are added up again."""

    def forward(m: Net, x: Tensor) -> Tensor:
        a, b = m.a(x), m.b(x)
        a = a / (1 + a.abs().sum(1, keepdim=True))
        b = b - b.sum(1, keepdim=True)
        b = b / (1 + b.abs().sum(1, keepdim=True))
        return m.head(torch.cat([a, b], 1).mean((2, 3)))

    return randomised(Net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1), head=nn.Linear(8, 2)))


def test_it_is_found_once_per_graph() -> None:
    """Analyses of one graph share it; another graph has its own."""
    model = plain()
    graph = engine.trace(model, image())
    assert structure_for(model, None, graph, engine.RULES) is structure_of(graph, engine.RULES)
    assert structure_for(model, image(), None, engine.RULES) is not structure_of(graph, engine.RULES)


def test_what_reads_zeros_is_listed() -> None:
    """With the slots that it reads."""
    found = structure_of(engine.trace(centred(), image()), engine.RULES)
    assert [node.op for node, _, _ in readers_of_zeros(found)] == ["sum"] * 3
    assert all(len(slots) == 4 for _, _, slots in readers_of_zeros(found))


def test_only_what_would_not_be_zero_freezes() -> None:
    """The first stem's channels are zero at the sum once they are masked; the second one's are not."""
    groups = {g.name: g.reason for g in engine.dependency_groups(centred(), image())}
    assert groups["a"] is None and "not zero there" in groups["b"]
    assert engine.not_safe_to_prune(centred(), image()) == []
