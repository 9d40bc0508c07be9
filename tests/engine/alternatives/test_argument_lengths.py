"""Containers of tensors with other numbers of items."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from torch import Tensor, nn

from engine.alternatives.argument_lengths import containers_of_tensors, longer, shorter
from engine.alternatives.arguments import Arguments

Pair = namedtuple("Pair", "one two")


class Frames(list[Any]):
    """A list of a class of its own."""


def test_a_container_keeps_its_class() -> None:
    """Lists and dictionaries of other classes as well; a named tuple has one length."""
    one = torch.zeros(1)
    for value in (Frames([one]), (one,), OrderedDict(a=one)):
        ways = [*longer(value), *(other for way in shorter(value) for other in way)]
        assert [type(way) for way in ways] == [type(value)] * 3 and [len(way) for way in ways] == [2, 3, 0]
    assert not list(longer(Pair(one, one))) and not list(shorter(Pair(one, one)))


def test_items_are_tensors_of_their_own() -> None:
    """One that is passed twice would be one input."""
    [first, second] = next(longer([torch.ones(2)]))
    assert first is not second and torch.equal(first, second)
    assert list(next(longer({3: 1.0, 7: 2.0}))) == [3, 7, 8]


def test_which_containers_hold_tensors() -> None:
    """Also inside of others, as deep as arguments are looked into."""
    value = {"frames": [torch.zeros(1)], "size": [3, 4], "pairs": [(torch.zeros(1), 1)]}
    paths = [path for path, _ in containers_of_tensors(("x",), value)]
    assert paths == [("x",), ("x", "frames"), ("x", "pairs"), ("x", "pairs", 0)]


class Net(nn.Module):
    """Takes lists, and as many tensors as there are."""

    def forward(self, frames: list[Tensor], states: list[Tensor], *more: Tensor) -> Tensor:
        """Add them."""
        return sum([*frames, *states, *more], torch.zeros(()))


def test_all_lists_at_once() -> None:
    """Code that goes through two lists takes them of one length."""
    one = torch.zeros(1)
    calls = [[args for args, _ in way] for way in Arguments(Net(), ([one], [one]), {}).lengths()]
    lengths = [[tuple(len(a) if isinstance(a, list) else 1 for a in args) for args in way] for way in calls]
    assert lengths == [
        [(2, 1), (3, 1)],
        [(0, 1)],
        [(1, 2), (1, 3)],
        [(1, 0)],
        [(1, 1, 1), (1, 1, 1, 1)],  # of the first tensor's shape
        [(1, 1, 1), (1, 1, 1, 1)],  # and numbers
        [(2, 2), (3, 3)],
    ]
