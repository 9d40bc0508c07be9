"""Batches that are drawn beside a training leave no trace in it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_compress.trainer.calibration import matching_part, train_batches
from lightning_compress.trainer.packages import MisconfigurationException


class Numbers(Dataset):
    """Sixteen numbers, with noise of three generators of its own."""

    def __init__(self) -> None:
        self.torch, self.numpy, self.plain = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(1, generator=self.torch) + self.numpy.random() + self.plain.random() + torch.rand(1)
        return index + noise.float() / 5


class Counting(Sampler):
    """Another order at each pass, by a count of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.passes)).tolist())

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset):
    """Goes on where it stopped."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < 64:
            self.place += 1
            yield torch.full((1,), float(self.place))


class Unread(IterableDataset):
    """Holds an iterator that cannot be copied."""

    def __init__(self) -> None:
        self.lines = (torch.ones(1) for _ in range(4))

    def __iter__(self) -> Any:
        return self.lines


def loader(kind: str) -> DataLoader:
    """Loaders whose order is kept in different places."""
    kinds: dict[str, Any] = {
        "global": lambda: DataLoader(Numbers(), 4, shuffle=True),
        "generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator()),
        "sampler": lambda: DataLoader(Numbers(), 4, sampler=Counting(16)),
        "stream": lambda: DataLoader(Stream(), 4),
        "workers": lambda: DataLoader(Numbers(), 4, sampler=Counting(16), num_workers=1, persistent_workers=True),
    }
    return kinds[kind]()


def around(loader: Any) -> Any:
    """What `train_batches` asks of a Trainer, and a module."""
    plugin = SimpleNamespace(convert_input=lambda batch: batch)
    strategy = SimpleNamespace(batch_to_device=lambda batch, dataloader_idx: batch)
    return SimpleNamespace(train_dataloader=loader, precision_plugin=plugin, strategy=strategy), LightningModule()


def draw(loader: Any, samples: int = 9) -> list[Tensor]:
    """Batches for a model of one input."""
    return train_batches(*around(loader), nn.Identity(), torch.zeros(1, 1), samples)


def passes(loader: Any, between: bool) -> list[Tensor]:
    """Two batches, then the rest, then another pass; with a draw in between or not."""
    torch.manual_seed(0)
    np.random.seed(0)
    batches, iterator = [], iter(loader)
    batches += [next(iterator), next(iterator)]
    if between:
        draw(loader)
    return [*batches, *iterator, *loader, torch.rand(1), torch.tensor(np.random.rand())]


@pytest.mark.parametrize("kind", ["global", "generator", "sampler", "stream", "workers"])
@pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
def test_the_order_and_all_random_states_stay(kind: str) -> None:
    """In the middle of a pass, of which the rest comes as it would have, and the next one too."""
    one, other = (passes(loader(kind), between) for between in (False, True))
    assert len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", ["global", "generator", "stream"])
def test_the_draw_follows_from_the_seed_alone(kind: str) -> None:
    """Whatever was drawn before, as in a run that is resumed; and there are as many batches as needed."""
    first, second = loader(kind), loader(kind)
    one = draw(first)
    torch.rand(3)
    if kind != "stream":  # a stream goes on from where it is
        list(second)
    assert len(one) == 3 and all(map(torch.equal, one, draw(second)))


def test_what_cannot_be_copied_is_refused() -> None:
    """Drawing would advance it, so that the training would miss what was drawn."""
    with pytest.raises(MisconfigurationException, match="cannot be copied"):
        draw(DataLoader(Unread(), 2))
    with pytest.raises(MisconfigurationException, match="single train dataloader"):
        draw([loader("global")])


def test_the_part_that_the_model_takes() -> None:
    """Of pairs, of nested batches, and of mappings; else an error with the shapes."""
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    net = nn.Conv2d(3, 1, 1)
    for batch in ([images, labels], [[images, labels], labels], {"input": images, "label": labels}):
        taken = matching_part(batch, net, torch.zeros(1, 3, 6, 6))
        assert (taken["input"] if isinstance(taken, dict) else taken) is images
    with pytest.raises(MisconfigurationException, match=r"No part of \[Tensor\[4\]\].* of `Conv2d`"):
        matching_part([labels], net, torch.zeros(1, 3, 6, 6))
