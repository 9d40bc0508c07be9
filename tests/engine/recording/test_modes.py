"""The train path is recorded where it can differ, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording.modes import readers_of_training, watched


class Block(nn.Module):
    """Asks for its mode where ``drop`` is not zero."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop, self.conv, self.more = drop, nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Take a second branch while training."""
        y: Tensor = self.conv(x)
        return y + self.more(x) if self.drop > 0 and self.training else y


class Derived(Block):
    """The same under another class."""


class Odd(nn.Module):
    """Defines the attribute itself."""

    training = True

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()


def test_readers_are_modules_with_children_whose_code_names_the_mode() -> None:
    """Leaves keep their mode, so they do not count."""
    model = nn.Sequential(Block(0.5), nn.BatchNorm2d(3), nn.Dropout())
    assert readers_of_training(model) == [model[0]]


@pytest.mark.parametrize("kind", [Block, Derived])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_the_train_path_is_recorded_where_the_mode_was_asked_for(kind: type[Block], drop: float) -> None:
    """A run that never asks is the same in both modes and is recorded once."""
    graph = engine.trace(nn.Sequential(kind(drop), nn.Conv2d(3, 2, 1)), torch.zeros(1, 3, 4, 4))
    assert any(node.path == "train" for node in graph.nodes) == (drop > 0)


def test_classes_are_as_they_were() -> None:
    """Also after an error, and for classes derived from each other."""
    model = nn.Sequential(Block(0.5), Derived(0.5))
    with pytest.raises(ValueError, match="stop"), watched(model) as seen:
        assert model[1].training and seen == {id(model[1])}
        model[0].eval()
        assert not model[0].training and seen == {id(model[0]), id(model[1])}
        raise ValueError("stop")
    assert "training" not in vars(Block) and "training" not in vars(Derived)
    assert not model[0].training and model[1].training


def test_what_cannot_be_watched_counts_as_read() -> None:
    """A class with an attribute of its own, and one that another run watches already."""
    odd, block = Odd(), Block(0.5)
    with watched([odd, block]) as outer, watched([block]) as inner:
        assert outer == {id(odd)} and inner == {id(block)}
