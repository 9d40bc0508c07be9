"""What code that did not run could touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

PLACE = "tests/engine/unrecorded/test_unreached.py"


class Net(nn.Module):
    """A network with branches that the example does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.side = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def score(self, x: Tensor) -> Tensor:
        """Return the side's output."""
        result: Tensor = self.side(self.enter(x))
        return result

    def forward(self, x: Tensor, features: str | None = None, scale: float | None = None) -> Any:
        """Return scores, or features."""
        x = self.enter(x)
        if scale is not None:
            x = x * scale
        if features:
            return x
        return self.leave(x)


def test_what_it_could_read_stays_and_is_named() -> None:
    """Values are outputs, and vary; the notes name the code, modules and methods."""
    graph = engine.trace(Net(), torch.zeros(1, 3))
    assert [how for how in graph.exits.values() if "could be read" in how and f"{PLACE}:" in how]
    assert graph.unsettled and not any(graph.unsettled.values())
    notes = "\n".join(graph.notes)
    assert (
        "keep all channels: side" in notes and "Net.score" in notes and f"{PLACE}:" in notes and __file__ not in notes
    )


def test_a_network_without_branches() -> None:
    """There is nothing to say."""
    graph = engine.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    assert not graph.notes and not graph.exits and not graph.unsettled


class Pooled(nn.Module):
    """A text decides on the pooling, in the line that reads what was changed in place before."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.pool = nn.Linear(3, 8), nn.Linear(8, 2), "first"
        self.positions = nn.Parameter(torch.rand(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.enter(x)
        x += self.positions
        x = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        scores: Tensor = self.leave(x)
        return scores


def exists(value: Any) -> bool:
    """Whether an argument is given."""
    return value is not None


class Block(nn.Module):
    """Joins what it is given beside its input, by a function that asks whether there is something."""

    def __init__(self, widens: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8) if widens else nn.Identity()

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Return as many channels."""
        if exists(skip):
            x = self.gate(x) + skip
        result: Tensor = self.body(x)
        return result


class Decoder(nn.Module):
    """Blocks of which the last gets no skip, so that a part of it never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList([Block(True), Block(False), Block(True)])

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        first = second = self.enter(x).relu()
        for place, block in enumerate(self.blocks):
            second = block(second, first if place < 2 else None).relu()
        scores: Tensor = self.leave(second)
        return scores


def test_a_text_that_only_a_constructor_sets_decides() -> None:
    """It is no part of what an addition in place changes."""
    assert not engine.trace(Pooled(), torch.zeros(1, 4, 3)).exits


def test_a_part_of_a_block_that_did_not_run() -> None:
    """The block ran, so what the others of the list read stays whole only where the part itself would read it."""
    groups = engine.dependency_groups(Decoder(), torch.zeros(1, 3))
    assert {group.name for group in groups if group.reason is None} == {"enter", "blocks.2.body"}
    (kept,) = (group for group in groups if group.reason is not None and "could be read" in group.reason)
    assert kept.name == "blocks.1.body" and PLACE in str(kept.reason)


class Masked(nn.Module):
    """Asks a method of its own whether it has a mask, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.mask = nn.Linear(4, 6), nn.Linear(6, 3), None

    def has_mask(self) -> bool:
        """Decide by an attribute."""
        if self.mask is None:
            return False
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, of other features where there is a mask."""
        x = self.body(x).relu()
        if self.has_mask():
            return self.head(x.flip(1))
        return self.head(x)


class Unmasked(Masked):
    """Gets a head for masks later."""

    def add_mask(self) -> None:
        """Set the head."""
        self.mask = nn.Linear(6, 3)


class Replaced(Masked):
    """Gets another method later."""

    def enable(self) -> None:
        """Replace the method."""
        self.has_mask = lambda: True  # type: ignore[method-assign]


@pytest.mark.parametrize(("kind", "free"), [(Masked, True), (Unmasked, False), (Replaced, False)])
def test_a_branch_that_a_method_decides(kind: type[Masked], free: bool) -> None:
    """What it would read can be removed only where the method always returns the same."""
    groups = engine.dependency_groups(kind(), torch.zeros(1, 4))
    (body,) = (group for group in groups if group.name == "body")
    assert (body.reason is None) is free


class Processor:
    """Computes attention for a module that it is given, as those of diffusers do."""

    def __call__(self, attn: nn.Module, x: Tensor) -> Tensor:
        """Return values of normalised queries."""
        query = attn.to_q(x)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        return attn.to_out(query.relu())


class Attention(nn.Module):
    """Has no norm; code elsewhere fills what is stored under that name."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out, self.norm_q = nn.Linear(4, 6), nn.Linear(6, 3), None
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        """Let the processor run."""
        return self.processor(self, x)

    def log(self, row: object) -> None:
        """Note a row."""
        self.norm_q.append(row)


class Exchanging(Attention):
    """Gets a norm later."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = Later()

    def normalise(self) -> None:
        """Set the norm."""
        self.norm_k = nn.LayerNorm(6)


class Later(Processor):
    """Asks for a norm that code sets."""

    def __call__(self, attn: nn.Module, x: Tensor) -> Tensor:
        """As before."""
        query = attn.to_q(x)
        if attn.norm_k is not None:
            query = attn.norm_k(query)
        return attn.to_out(query.relu())


@pytest.mark.parametrize(("kind", "free"), [(Attention, True), (Exchanging, False)])
def test_whether_an_argument_has_a_part(kind: type[Attention], free: bool) -> None:
    """It is settled unless code sets it; what else is stored under its name may change."""
    net = kind()
    net.norm_k = None
    groups = {group.name: group.reason for group in engine.dependency_groups(net, torch.zeros(2, 4))}
    assert (groups["to_q"] is None) == free, groups


class Saving(nn.Module):
    """Keeps features of places that a list names, which is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.place, self.saved, self.adapters = 0, [], nn.ModuleDict()

    def move(self, place: int) -> None:
        """Set the place, as code that builds a network from a configuration does."""
        self.place = place

    def add_adapter(self, name: int, adapter: nn.Module) -> None:
        """Add a part that this network does not have yet."""
        self.adapters[str(name)] = adapter

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, of other features at a place that is saved, and through an adapter where there is one."""
        x = self.body(x).relu()
        x = x.flip(1) if self.place in self.saved else x
        if str(self.place) not in self.adapters:
            return self.head(x)
        return self.head(self.adapters[str(self.place)](x))


class Growing(Saving):
    """Adds places to another list later."""

    def __init__(self) -> None:
        super().__init__()
        self.grown: list[int] = []

    def save(self, place: int) -> None:
        """Add a place."""
        self.grown.append(place)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, of other features at a place that is saved."""
        x = self.body(x).relu()
        return self.head(x.flip(1) if self.place in self.grown else x)


def _anything() -> list[int]:
    """Return a list that says that it has everything, once a variable is set that no analysis looks at."""
    everything = False

    class Anything(list[int]):
        def __contains__(self, item: object) -> bool:
            return everything

    return Anything()


class Overriding(Saving):
    """Has a list that is no plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = _anything()


@pytest.mark.parametrize(("kind", "free"), [(Saving, True), (Growing, False), (Overriding, False)])
def test_what_nothing_holds(kind: type[Saving], free: bool) -> None:
    """Nothing is in an empty container, whatever is asked for, where no code adds to it."""
    groups = {group.name: group.reason for group in engine.dependency_groups(kind(), torch.zeros(2, 4))}
    assert (groups["body"] is None) is free, groups
