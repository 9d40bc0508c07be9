"""Drawing from dataloaders that go on as if nothing had been drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_compress.trainer.loaders import copied_loader, first_of, first_of_each, reseeded, same_order
from lightning_compress.trainer.packages import MisconfigurationException


class Drawing(Dataset[float]):
    """Samples from a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> float:
        return float(self.random.random())


class Turning(Sampler[int]):
    """Begins somewhere else in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(n + self.epoch) % 4 for n in range(4)])

    def __len__(self) -> int:
        return 4


class Stream(IterableDataset[int]):
    """Goes on where it was."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 8:
            self.place += 1
            yield self.place


class Numbers(Dataset[int]):
    """As many numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> int:
        return place


def lists(loader: Any) -> list[Any]:
    """Return all batches."""
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Drawing(), 2),
        lambda: DataLoader(Numbers(), 2, sampler=Turning()),
        lambda: DataLoader(Stream(), 2),
        lambda: DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
    ],
    ids=["dataset", "sampler", "stream", "generator"],
)
def test_what_comes_next_is_what_would_have_come(make: Any) -> None:
    """Whatever draws has its state back, or was a copy."""
    loader, other = make(), make()
    for _ in range(2):
        with same_order(loader):
            first = first_of(loader)
        expected = lists(other)
        assert (first is None or first.tolist() == expected[0]) and lists(loader) == expected


def test_workers_that_stay() -> None:
    """An iteration that is going on is not started again."""
    loader = DataLoader(Numbers(), 2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1] and first_of(loader).tolist() == [0, 1]
    assert next(iterator).tolist() == [2, 3] and loader._iterator is iterator


def test_collections() -> None:
    """The first batch of each loader in them, None of one that is empty."""
    loaders = {"a": DataLoader(Numbers(), 2), "b": [DataLoader(Numbers(), 3)], "c": iter(())}
    first = first_of_each(loaders)
    assert first["a"].tolist() == [0, 1] and first["b"][0].tolist() == [0, 1, 2] and first["c"] is None


def test_a_seed_decides_the_copy() -> None:
    """And the loader's own generator is as before."""
    generator = torch.Generator().manual_seed(3)
    loader: DataLoader[Tensor] = DataLoader(torch.arange(64), 64, shuffle=True, generator=generator)  # type: ignore[arg-type]
    before, orders = generator.get_state(), []
    for seed in (-1, -1, 2**70 + 2):  # any integers
        with reseeded(loader, seed):
            orders.append(lists(copied_loader(loader, seed)))
    assert orders[0] == orders[1] != orders[2] and torch.equal(generator.get_state(), before)


class OnePass(IterableDataset[int]):
    """Goes on where it was left."""

    def __init__(self) -> None:
        self._items = (n for n in range(3))

    def __iter__(self) -> Iterator[int]:
        """Return the same generator each time."""
        return self._items


@pytest.mark.parametrize("loader", [(n for n in range(3)), DataLoader(OnePass(), batch_size=None)])
def test_data_that_can_be_read_once(loader: Any) -> None:
    """A batch that is drawn would be lost; an iterator that can be copied goes on where it was."""
    with pytest.raises(MisconfigurationException, match="iterate over a (generator|OnePass) only once"):
        first_of(loader)
    assert list(loader) == [0, 1, 2]
    numbers = zip([1, 2], strict=True)
    assert first_of(numbers) == (1,) and list(numbers) == [(1,), (2,)]
