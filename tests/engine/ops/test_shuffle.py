"""Pixel (un)shuffle and channel shuffle against running them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Mean, dead, image
from tests.engine.ops.brute import check_constants, check_labels, check_use


def test_pixel_shuffle_ties_the_channels_of_a_block() -> None:
    """r² channels become one and go together."""
    check_labels(lambda x: torch.pixel_shuffle(x, 2), classes=2)


def test_pixel_unshuffle_ties_nothing() -> None:
    """One channel becomes r², and goes on its own."""
    check_labels(lambda x: torch.pixel_unshuffle(x, 2), classes=8)


def test_channel_shuffle_ties_equal_places_of_the_groups() -> None:
    """The group count stays, so the same place goes from each group."""
    check_labels(lambda x: torch.channel_shuffle(x, 2), classes=4)


def test_constants_are_rearranged() -> None:
    """A shuffled block is constant where its channels agree; unshuffled and shuffled channels keep theirs."""
    check_constants(lambda x: torch.pixel_unshuffle(x, 2), constant=range(16))
    check_constants(lambda x: torch.channel_shuffle(x, 2), constant=[0, 2, 4, 6])
    check_constants(lambda x: torch.pixel_shuffle(x, 2), constant=[])  # its channels have other biases
    check_constants(lambda x: torch.pixel_shuffle(torch.relu(-x * x), 2), constant=[0])


def test_use_is_rearranged() -> None:
    """An unread channel makes the channels unused that it is made of."""
    check_use(lambda x: torch.pixel_shuffle(x, 2), [0], [0, 1, 2, 3])
    check_use(lambda x: torch.pixel_unshuffle(x, 2), [0, 1, 2, 3, 4], [0])
    check_use(lambda x: torch.channel_shuffle(x, 2), [1, 2], [1, 4])


def test_profiles_do_not_pass_a_pixel_shuffle() -> None:
    """A constant that differs at borders becomes an interleaved map: not a constant behind the shuffle."""
    pool = nn.AvgPool2d(3, 1, 1)
    check_constants(lambda m, x: torch.pixel_unshuffle(m.pool(x), 2), constant=[], pool=pool)


@pytest.mark.parametrize("kind", ["channels", "columns", "nearly everything"])
def test_shuffled_grouped_convolutions(kind: str) -> None:
    """ShuffleNet's unit: grouped convolution, channel shuffle, grouped convolution."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 8, 1, groups=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ChannelShuffle(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            Mean(),
            nn.Linear(8, 2),
        )
    )
    check_exact(model, KINDS[kind](model, 3), image(), image(8))


def test_repaired_shuffle_shrinks() -> None:
    """Masks of whole tied places really go through a channel shuffle."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ChannelShuffle(2), Mean(), nn.Linear(8, 2)))
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 1, 4, 5]}), model, image())
    plan = check_exact(model, masks, image())
    assert plan.slices["0.weight"].shape[0] == 4


def test_patches_carry_their_channel() -> None:
    """A channel becomes k² rows of patches, which go with it; constants stay unless a patch reaches outside."""
    check_labels(lambda x: F.unfold(x, 2), classes=8)
    check_labels(lambda x: F.unfold(x, 3, padding=1), classes=8, positions=False)
    check_use(lambda x: F.unfold(x, 2)[..., None], [0, 1, 2, 3, 4], [0])
    check_constants(lambda x: F.unfold(x, 2)[..., None], constant=range(16))
    check_constants(lambda x: F.unfold(x, 3, padding=1)[..., None], constant=[])
    check_constants(lambda x: F.unfold(torch.relu(-x * x), 3, padding=1)[..., None], constant=range(36))


def test_pasted_patches_tie_their_rows() -> None:
    """k² rows become one channel; where patches overlap only zeros are known."""
    paste = lambda x: F.fold(x.flatten(2)[..., :9], (4, 4), 2)  # noqa: E731
    check_labels(paste, classes=2)
    check_use(paste, [0], [0, 1, 2, 3])
    check_constants(paste, constant=[])
    check_constants(lambda x: paste(torch.relu(-x * x)), constant=[0])


def test_a_convolution_by_patches() -> None:
    """Unfold, a linear layer, fold, as some vision transformers embed: half of the channels really go."""
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Unfold(2, stride=2), nn.Conv1d(24, 8, 1), nn.ReLU()]
    model = randomised(
        nn.Sequential(*layers, nn.Fold((6, 6), 2, stride=2), nn.Conv2d(2, 4, 3), Mean(), nn.Linear(4, 2))
    )
    for kind in KINDS.values():
        check_exact(model, kind(model, 3), image(), image(batch=3))
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 2, 4], "3": [0, 1, 2, 3]}, bias=True), model, image())
    plan = check_exact(model, masks, image())
    assert plan.slices["3.weight"].shape == (4, 12, 1) and plan.slices["6.weight"].shape[1] == 1
