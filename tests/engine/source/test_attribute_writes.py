"""Attributes that code writes to, found without running it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from engine.source.attribute_writes import EVERYTHING, written_attributes


class Wide(nn.Module):
    """Writes in all ways, and reads one attribute that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.built = 1

    def assign(self) -> None:
        """An assignment, a sum and a tuple."""
        self.assigned = 1
        self.summed += 1
        self.first, self.second = 1, 2

    def fill(self, x: Tensor) -> None:
        """An index, a method in place, other memory, and an argument."""
        self.indexed[self.reading] = x
        self.copied[:2].copy_(x)
        self.memory.data = x
        torch.add(x, x, out=self.written_out)

    def contain(self, x: Tensor) -> None:
        """Containers, and names for them."""
        self.cache.append(x)
        self.table["a"] = x * self.read
        alias = self.aliased
        alias[0] = x
        summed = self.added
        summed += x

    def gather(self, x: Tensor) -> None:
        """New containers of attributes: one is filled, an item of another, and what may be either."""
        waiting = deque([(self.queued, None)])
        waiting.append((x, None))
        names = {"": self.keyed}
        names["x"] = x
        items = [self.listed]
        items[0].append(x)
        either = self.chosen or {}
        either["x"] = x

    def outside(self, other: Wide) -> None:
        """Another object, and a name in quotes."""
        other.foreign = 1
        setattr(other, "quoted", 1)  # noqa: B010 - that is what is looked for

    def nested(self) -> Iterator[int]:
        """In a function inside."""

        def inner() -> None:
            self.inside = 1

        inner()
        yield 1

    def _load_from(self) -> None:
        self.loaded = 1


class Averaged(nn.Module):
    """Goes through all buffers."""

    @torch.no_grad()
    def update(self, other: nn.Module) -> None:
        """Average."""
        for mine, theirs in zip(self.buffers(), other.buffers(), strict=True):
            mine.lerp_(theirs, 0.1)


WRITES = """assigned summed first second indexed copied memory written_out cache table aliased added listed chosen
    foreign quoted inside""".split()


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name: str) -> None:
    """Each way to write."""
    assert name in written_attributes(Wide())[Wide]


@pytest.mark.parametrize("name", ["built", "read", "reading", "loaded", "queued", "keyed"])
def test_a_read_is_no_write(name: str) -> None:
    """Neither is what builds or loads the model."""
    assert name not in written_attributes(Wide())[Wide]


def test_a_write_to_all_buffers() -> None:
    """A loop over buffers names none of them."""
    assert EVERYTHING in written_attributes(Averaged())[Averaged]


def test_torch_is_left_out() -> None:
    """Its layers are known."""
    assert written_attributes(nn.BatchNorm2d(3)) == {nn.BatchNorm2d: frozenset()}
