"""What a number can have become when tensors were narrowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.numbers.counts import Dimension, blocks, explained, related, sizes_of


def dimension(*kept: int) -> Dimension:
    """A dimension with a mask of what is kept."""
    return Dimension(len(kept), sum(kept), torch.tensor(kept) > 0)


HEADS = dimension(*[1, 1, 0, 0, 1, 1, 0, 0] * 3)  # queries, keys and values of four heads of two


@pytest.mark.parametrize(
    ("old", "new", "kept", "is_explained"),
    [
        (4, 2, HEADS, True),
        (4, 3, HEADS, False),
        (24, 12, HEADS, True),
        (48, 24, HEADS, True),
        (48, 12, HEADS, False),
        (4, 4, HEADS, True),
        (4, 2, Dimension(24, 24, None), False),
        (4, 2, Dimension(6, 3, None), False),
        (4, 2, Dimension(8, 4, None), True),
        (7, 3, HEADS, True),  # one part of several that a dimension is split into
        (7, 1, HEADS, False),
    ],
)
def test_counts_of_what_is_kept(old: int, new: int, kept: Dimension, is_explained: bool) -> None:
    """Blocks, multiples and parts of a dimension; nothing over one that stays whole."""
    assert explained(old, new, [Dimension(5, 5, None), kept]) is is_explained


def test_blocks_lose_the_same() -> None:
    """Else their number is none; blocks around them may go as a whole."""
    assert blocks(torch.tensor([1, 1, 0, 1]), 2) is None
    assert blocks(torch.tensor([0, 0, 0, 0, 1, 0, 1, 0]), 2, outer=2) == 2


def test_relations() -> None:
    """A number counts what it divides, or what divides it; a dimension of one tells nothing."""
    assert related(4, [Dimension(12, 12, None)]) and related(12, [Dimension(4, 4, None)])
    assert not related(4, [Dimension(6, 6, None), Dimension(1, 1, None)])


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (nn.Linear(3, 2), 1),
        (nn.Conv2d(4, 6, 3, groups=2), 2),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), 2),
        (nn.BatchNorm2d(3), 1),
        (nn.BatchNorm2d(3, affine=False), 1),
        (nn.InstanceNorm2d(3, affine=True), 1),
        (nn.GroupNorm(2, 4), 1),
        (nn.RNN(3, 5), 1),
        (nn.GRU(3, 5, 2, bidirectional=True), 1),
        (nn.LSTM(3, 5, proj_size=2), 1),
        (nn.LSTMCell(3, 5), 1),
        (nn.GRUCell(3, 5), 1),
        (nn.RNNCell(3, 5), 1),
    ],
    ids=str,
)
def test_layers_of_torch_agree_with_their_weights(layer: nn.Module, groups: int) -> None:
    """Every number that is said to follow does."""
    sizes = sizes_of(layer, {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}, groups)
    assert sizes and {name: getattr(layer, name) for name in sizes} == sizes


def test_other_modules() -> None:
    """Nothing follows for modules of the user's, or where the weight is not a tensor of the layer's own."""
    assert not sizes_of(nn.Sequential(), {}) and not sizes_of(nn.BatchNorm1d(2, False, track_running_stats=False), {})
    assert not sizes_of(nn.Linear(1, 1), {"original0": (1, 1)})
