"""Which slots are alike."""

from __future__ import annotations

import torch
from torch import nn

from engine.removal.clusters import clusters
from tests.engine.nets import Net, image, plain, structure


def test_slots_of_one_layer_are_alike() -> None:
    """Channels that touch the same parameters get one number; frozen ones get -1."""
    found = structure(plain(), image())
    number = clusters(found)
    first = number[found.along(found.graph.stored["0.weight"], 0)]
    second = number[found.along(found.graph.stored["3.weight"], 0)]
    head = number[found.along(found.graph.stored["7.weight"], 0)]
    assert len(first.unique()) == 1 and len(second.unique()) == 1 and first[0] != second[0]
    assert (head == -1).all()


def test_a_slice_tells_channels_apart() -> None:
    """Half of the channels is read by a second layer: two groups."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        half = x.shape[1] // 2
        return m.head(x.mean((2, 3))) + m.other(x[:, :half].mean((2, 3)))

    model = Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2), other=nn.Linear(4, 2))
    found = structure(model, image().float())
    number = clusters(found, torch.ones(len(found.roots), dtype=torch.bool))
    of = number[found.along(found.graph.stored["stem.weight"], 0)]
    assert len(of[:4].unique()) == 1 and len(of[4:].unique()) == 1 and of[0] != of[4]


def test_balanced_pieces_are_apart() -> None:
    """Halves of a chunk are one group for users, two where they have to be balanced."""
    model = Net(
        lambda m, x: m.head(torch.cat(m.stem(x).chunk(2, 1), 1).mean((2, 3))),
        stem=nn.Conv2d(3, 8, 1),
        head=nn.Linear(8, 2),
    )
    found = structure(model, image().float())
    slots = found.along(found.graph.stored["stem.weight"], 0)
    assert len(clusters(found, balanced=False)[slots].unique()) == 1
    assert len(clusters(found)[slots].unique()) == 2


def test_only_the_slots_asked_for_are_numbered() -> None:
    """The rest is -1."""
    found = structure(plain(), image())
    slots = found.along(found.graph.stored["0.weight"], 0)
    asked = torch.zeros(len(found.roots), dtype=torch.bool)
    asked[slots[:2]] = True
    number = clusters(found, asked)
    assert (number >= 0).sum() == 2 and (number[slots[:2]] == 0).all()
