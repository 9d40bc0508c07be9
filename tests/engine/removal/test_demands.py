"""Sizes in Python code that do not follow freeze what they touch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.removal.demands import settle
from engine.removal.shrink import Shrunk
from engine.removal.structure import structure_of
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net, dead, image


class Sized(nn.Module):
    """Views channels by an attribute of its own."""

    def __init__(self, view: Callable[[Sized, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head, self.view = nn.Conv2d(3, 8, 1), nn.Linear(8, 2), view
        self.heads = 2
        self.width = 8

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.view(self, self.stem(x)))


FOLLOWS: dict[str, Callable[[Sized, Tensor], Tensor]] = {
    "flatten": lambda m, x: x.mean((2, 3), keepdim=True).flatten(1),
    "minus one": lambda m, x: x.mean((2, 3), keepdim=True).view(x.size(0), -1),
    "shape": lambda m, x: x.view(*x.shape[:2], x.shape[2] * x.shape[3]).mean(2),
    "attribute and shape": lambda m, x: (
        x.view(x.shape[0], m.heads, x.shape[1] // m.heads, -1)
        .transpose(1, 2)
        .reshape(x.shape[0], x.shape[1], -1)
        .mean(2)
    ),
    "attribute of a layer": lambda m, x: x.view(x.shape[0], m.stem.out_channels, -1).mean(2),
    "attribute of the consumer": lambda m, x: x.mean((2, 3)).view(-1, m.head.in_features),
}
STAYS: dict[str, Callable[[Sized, Tensor], Tensor]] = {
    "literal": lambda m, x: x.view(-1, 8, 36).mean(2),
    "an attribute that is a factor too": lambda m, x: x.view(x.shape[0], m.width, -1).mean(2) * m.width,
    "an attribute that is counted to": lambda m, x: (
        sum(x for _ in range(m.width)).view(x.shape[0], m.width, -1).mean(2)
    ),
    "batch by a literal": lambda m, x: x.mean((2, 3)).reshape(2, 8),
    "copied number": lambda m, x: x.view(x.shape[0], int(str(x.shape[1])), -1).mean(2),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_follows_is_free(name: str) -> None:
    """A size that derives from a shape or a layer's attribute does not stop pruning."""
    model = randomised(Sized(FOLLOWS[name]))
    assert engine.not_safe_to_prune(model, image()) == []
    masks = engine.fix_mask_conflict(dead(model, {"stem": [0, 4]}, bias=True), model, image())
    plan = check_exact(model, masks, image())
    assert plan.slices["stem.weight"].shape[0] == 6


@pytest.mark.parametrize("name", STAYS)
def test_what_does_not_follow_stays(name: str) -> None:
    """A number that is written down pins its channels, with the line in the reason; the result is exact."""
    model = randomised(Sized(STAYS[name]))
    unsafe = engine.not_safe_to_prune(model, image())
    assert list(unsafe) == ["stem"] and "test_demands.py:" in unsafe.reasons["stem"]
    plan = check_exact(model, dead(model, {"stem": [0, 4]}, bias=True), image())
    assert "stem.weight" not in plan.slices


def test_an_attribute_is_set() -> None:
    """Where the call cannot be edited and takes its size from an attribute, that follows; no other does."""
    model = randomised(Sized(lambda m, x: x.view(x.shape[0], m.width, -1).mean(2)))
    assert engine.not_safe_to_prune(model, image()) == []
    plan = check_exact(model, dead(model, {"stem": [0, 4]}, bias=True), image(), image(9))
    assert plan.attributes[""] == {"width": 6} and not plan.exchanges


def test_unmet_demands_name_the_node() -> None:
    """One reason per node, with the expression as the code has it."""
    model = Sized(STAYS["an attribute that is a factor too"])
    graph = engine.trace(model, image().float())
    structure = structure_of(graph, engine.RULES)
    keep = torch.ones(len(structure.roots), dtype=torch.bool)
    assert settle(Shrunk(structure, keep)).unmet == ()
    keep[structure.along(graph.stored["stem.weight"], 0)[:2]] = False
    ((node, reason, slots),) = settle(Shrunk(structure, keep)).unmet
    assert node.op == "view" and "width = 8" in reason


def test_only_the_groups_at_fault_are_frozen() -> None:
    """A literal behind one layer leaves the other layers free."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(m.second(torch.relu(m.first(x))).view(-1, 6, 36).mean(2))

    model = Net(forward, first=nn.Conv2d(3, 4, 1), second=nn.Conv2d(4, 6, 1), head=nn.Linear(6, 2))
    assert engine.not_safe_to_prune(model, image().float()) == ["second"]
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image().float())}
    assert reasons["first"] is None and "view" in reasons["second"]


def test_halves_that_do_not_follow_stay() -> None:
    """A floor division follows for some removals only; where it does not, channels stay, and the result is exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        half = x.shape[1] // 2
        return m.head(torch.cat([x[:, half:], x[:, :half]], 1).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1, 2]}, bias=True), image())
    assert plan.is_empty or plan.slices["stem.weight"].shape[0] in (6, 8)


@pytest.mark.parametrize("literal", [True, False])
def test_a_state_of_literal_size(literal: bool) -> None:
    """``torch.zeros(b, 8, …)`` for a recurrent state pins its channels; one that asks the layer follows."""

    def forward(m: Net, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 8 if literal else m.old.in_channels, *x.shape[2:], dtype=x.dtype)
        for _ in range(2):
            state = torch.tanh(m.new(x) + m.old(state))
        return m.head(state.mean((2, 3)))

    model = randomised(Net(forward, new=nn.Conv2d(3, 8, 1), old=nn.Conv2d(8, 8, 3, padding=1), head=nn.Linear(8, 2)))
    unsafe = engine.not_safe_to_prune(model, image())
    assert sorted(unsafe) == (["new", "old"] if literal else [])
    masks = engine.fix_mask_conflict(dead(model, {"new": [0, 1], "old": [0, 1]}), model, image())
    plan = check_exact(model, masks, image(), image(8))
    assert plan.is_empty if literal else plan.slices["new.weight"].shape[0] == 6


def _branch(condition: Callable[[Sized, Tensor], bool]) -> Callable[[Sized, Tensor], Tensor]:
    def view(m: Sized, x: Tensor) -> Tensor:
        return (x.amax((2, 3)), x.mean((2, 3)))[bool(condition(m, x))]  # no code that does not run

    return view


BRANCHES: dict[str, tuple[Callable[[Sized, Tensor], bool], bool]] = {
    # a condition, and whether it comes out the same with fewer channels
    "as many as an attribute": (lambda m, x: x.shape[1] == m.width, True),
    "at least a literal": (lambda m, x: x.shape[1] >= 7, False),
    "at least a part": (lambda m, x: x.shape[1] > 0.9 * 8, False),
    "a multiple": (lambda m, x: not x.shape[1] % 8, False),
    "a whole part": (lambda m, x: int(x.shape[1] / 2) > 3, False),
    "a part": (lambda m, x: x.shape[1] / 2 > 3.5, False),
    "a table": (lambda m, x: {6: True}.get(x.shape[1]) is None, False),
    "a loop": (lambda m, x: [i for i in range(x.shape[1]) if i > 6] != [], False),
    "a length": (lambda m, x: len(x[0]) == 8, False),
    "a logarithm": (lambda m, x: math.log2(x.shape[1]) == 3, False),
    "rounded": (lambda m, x: math.ceil(x.shape[1] / 8) == 1, True),
    "a part of the positions": (lambda m, x: int(x.shape[2] / 2) == 3 or x.shape[2] > 6, True),
    "as many as the layer's": (lambda m, x: x.shape[1] == m.stem.out_channels, True),
    "of a tuple": (lambda m, x: x.shape[:2] == (x.shape[0], m.head.in_features), True),
    "positions": (lambda m, x: x.shape[2] == 6 and x.shape[0] < 5 or x.shape[2] > 6, True),
    "at least one": (lambda m, x: x.shape[1] > 0, True),
    "no number": (lambda m, x: x.shape[1] != None, True),  # noqa: E711
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_a_size_is_taken_as_before(name: str) -> None:
    """Where another number of channels would lead the code elsewhere they stay, with the line; else they go."""
    condition, follows = BRANCHES[name]
    model = randomised(Sized(_branch(condition)))
    layers = engine.not_safe_to_prune(model, image())
    assert layers == ([] if follows else ["stem"])
    if not follows:
        assert "holds depends on how many channels there are" in layers.reasons["stem"]
        assert "test_demands.py:" in layers.reasons["stem"]
    check_exact(model, dead(model, {"stem": [0, 4]}, bias=True), image())


def test_a_branch_that_many_channels_decide() -> None:
    """A few channels may go as long as the comparison holds; masks that would break it keep what is needed."""
    model = randomised(Sized(_branch(lambda m, x: x.shape[1] > 3)))
    plan = check_exact(model, dead(model, {"stem": [0, 1]}, bias=True), image())
    assert plan.slices["stem.weight"].shape[0] == 6
    plan = check_exact(model, dead(model, {"stem": range(6)}, bias=True), image())
    assert "stem.weight" not in plan.slices or plan.slices["stem.weight"].shape[0] > 3


def test_an_error_that_fewer_channels_would_raise() -> None:
    """A model that checks its own sizes against an attribute is compacted where its checks allow."""

    def checked(m: Sized, x: Tensor) -> Tensor:
        if x.shape[1] - m.width < 0:
            raise ValueError("too few channels")
        return x.mean((2, 3))

    model = randomised(Sized(checked))
    check_exact(model, dead(model, {"stem": [0, 4]}, bias=True), image())
    assert engine.not_safe_to_prune(model, image()) == ["stem"]
