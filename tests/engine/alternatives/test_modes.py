"""The train path is recorded where it can differ, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch import is_grad_enabled as asked_by_name

import engine
from engine.alternatives.modes import may_differ, watched


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


class Leaf(nn.Module):
    """Asks for its mode, and has no parts.

    Args:
        extra: whether it has a weight that only train mode reads.
    """

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1)) if extra else None

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples while training, or scale channels."""
        if not getattr(self, "training"):  # noqa: B009 - however it is read
            return x
        if self.weight is not None:
            return x * self.weight
        return x * x.new_empty([len(x), *[1] * (x.ndim - 1)]).bernoulli_(0.5)


def test_layers_of_torch_do_not_count() -> None:
    """Their mode changes their op alone."""
    model = nn.Sequential(Block(0.5), nn.BatchNorm2d(3), nn.Dropout(), Leaf(False))
    assert may_differ(model) == [model[0], model[3]]


@pytest.mark.parametrize("extra", [False, True])
def test_a_leaf_is_run_alone(extra: bool) -> None:
    """Stochastic depth says nothing of channels; what reads a weight does."""
    graph = engine.trace(nn.Sequential(nn.Conv2d(3, 3, 1), Leaf(extra)), torch.zeros(2, 3, 4, 4))
    assert ("1.weight" in graph.stored) == extra == any(node.path == "train" for node in graph.nodes)


class Asking(nn.Module):
    """Asks whether gradients are on.

    Args:
        ask: how.
    """

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.first, self.second, self.ask = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), ask

    def forward(self, x: Tensor) -> Tensor:
        """Take a second branch."""
        y: Tensor = self.first(x)
        return y + self.second(x) if self.ask() else y


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.is_grad_enabled(),
        lambda: not torch.is_inference_mode_enabled(),
        lambda: torch.is_autocast_enabled(),
        lambda: asked_by_name(),
    ],
)
def test_the_other_answer_is_recorded(ask: Any) -> None:
    """Under another name too; afterwards torch is as it was."""
    graph = engine.trace(Asking(ask), torch.zeros(2, 3, 4, 4))
    assert {"first.weight", "second.weight"} <= set(graph.stored)
    assert torch.is_grad_enabled is asked_by_name is torch._C.is_grad_enabled


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
    """A class with an attribute of its own; runs inside of each other watch together."""
    odd, block = Odd(), Block(0.5)
    with watched([odd, block]) as outer, watched([block]) as inner:
        assert outer == {id(odd)} and inner == set()
        assert block.training and outer == {id(odd), id(block)} and inner == {id(block)}
    assert "training" not in vars(Block)


class Checkpointed(nn.Module):
    """Runs its layers another way where gradients are wanted, as memory-efficient dense blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.saves = nn.Embedding(3, 4), nn.Linear(4, 2), False

    def set_saving(self, saves: bool) -> None:
        """Save memory, or do not."""
        self.saves = saves

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y = self.enter(x)  # of whole numbers, which cannot require gradients
        if self.saves and y.requires_grad:
            y = torch.utils.checkpoint.checkpoint(torch.relu, y, use_reentrant=False)
        else:
            y = torch.relu(y)
        return self.leave(y)  # type: ignore[no-any-return]


def test_tensors_that_require_gradients() -> None:
    """None does while a model is recorded; what would run then is recorded as well, and nothing stays whole."""
    before = vars(Tensor).get("requires_grad")
    groups = engine.dependency_groups(Checkpointed(), torch.zeros(1, 3, dtype=torch.int64))
    assert {group.name: group.reason for group in groups}["enter"] is None
    assert vars(Tensor).get("requires_grad") is before
    assert torch.zeros(1, requires_grad=True).requires_grad and not torch.zeros(1).requires_grad
