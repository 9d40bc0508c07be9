"""Pooling, interpolation, padding and reductions against running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.ops.spatial import AVERAGE, KEEPING
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Mean, Net, constants_of, dead, image
from tests.engine.ops.brute import check_constants, check_labels, check_use

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, 2),
    "average": lambda x: F.avg_pool2d(x, 2),
    "average over real entries": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "bicubic, filtered": lambda x: F.interpolate(x, size=3, mode="bicubic", antialias=True),
    "bicubic, filtered, larger": lambda x: F.interpolate(x, size=7, mode="bicubic", antialias=True),
    "bilinear, filtered": lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "largest": lambda x: x.amax((2, 3), keepdim=True),
    "maximum": lambda x: F.max_pool2d(x, 3, 2, 1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "nearest by centres": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "smallest": lambda x: x.amin(3, keepdim=True),
}
if hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):  # since torch 2.15
    CALLS["lanczos"] = lambda x: torch.ops.aten._upsample_lanczos2d_aa(x, [3, 5], False)


@pytest.mark.parametrize("name", CALLS)
def test_pools_keep_channels_and_their_constants(name: str) -> None:
    """Channel by channel, at any resolution, the same constant comes out; an unread channel is unused."""
    check_labels(CALLS[name], classes=8)
    check_constants(CALLS[name], constant=[0, 1, 2, 3])
    check_use(CALLS[name], columns=[1, 7], unused=[1, 7])


def test_one_and_three_dimensions() -> None:
    """The number in an op's name says how many dimensions it runs over."""
    check_labels(lambda x: F.max_pool1d(x.flatten(2), 2), classes=8)
    check_labels(lambda x: F.avg_pool1d(x.flatten(2), 2), classes=8)
    check_labels(lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 2, 2)), classes=8)
    check_labels(lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"), classes=8)
    assert len(set(KEEPING) & set(AVERAGE)) == 0


def test_a_pool_that_counts_its_padding_gives_a_profile() -> None:
    """All constants are multiplied by one common map; zero stays zero."""
    f = lambda x: F.avg_pool2d(x, 3, 1, 1)  # noqa: E731
    check_constants(f, constant=[0, 1, 2, 3])
    check_labels(f, classes=8)
    model = Net(lambda m, x: f(m.stem(x)), stem=nn.Conv2d(3, 4, 1)).double()
    constants = constants_of(model, image(), dead(model, {"stem": [0]}))
    assert constants.has_profile(constants.graph.outputs[0])


def test_a_divisor_gives_a_profile() -> None:
    """``divisor_override`` scales every constant alike."""
    check_constants(lambda x: F.avg_pool2d(x, 2, divisor_override=3), constant=[0, 1, 2, 3])


@pytest.mark.parametrize(
    ("f", "known"),
    [
        (lambda x: F.pad(x, (1, 1, 1, 1)), [0, 1, 2, 3]),  # a profile
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [0, 1, 2, 3]),
        (lambda x: F.pad(x, (1, 0, 0, 0), mode="replicate"), [0, 1, 2, 3]),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), [0, 1, 2, 3]),
        (lambda x: F.pad(x, (-1, -1, 0, 0)), [0, 1, 2, 3]),
        (lambda x: F.pad(x, (1, 1, 1, 1), value=0.5), []),
        (lambda x: F.pad(torch.relu(-x * x) + 0.5, (1, 1, 1, 1), value=0.5), [0, 1, 2, 3]),
        (lambda x: F.pad(x, (0, 0, 0, 0, 2, 1), value=0.25), [0, 1, 2, 3, 4, 5, 10]),
    ],
)
def test_constants_of_padding(f: Callable[[Tensor], Tensor], known: list[int]) -> None:
    """Zeros around constants give one common map; other numbers make them vary; added channels are constants."""
    check_constants(f, known)


def test_padding_with_the_constant_itself_keeps_it() -> None:
    """A channel of 0.5 padded with 0.5 is 0.5 everywhere."""
    model = Net(lambda m, x: F.pad(m.stem(x), (1, 1, 1, 1), value=0.5), stem=nn.Conv2d(3, 4, 1)).double()
    nn.init.constant_(model.stem.bias, 0.5)
    constants = constants_of(model, image(), dead(model, {"stem": [0, 1]}))
    row = constants.along(constants.graph.outputs[0], 1)
    assert row[:2].tolist() == [0.5, 0.5] and row[2:].isnan().all()
    assert not constants.has_profile(constants.graph.outputs[0])


def test_labels_of_padding() -> None:
    """Positions leave channels alone; added channels are fixed, those in the middle may go; cut channels are frozen."""
    check_labels(lambda x: F.pad(x, (1, 2, 0, 1)), classes=8, positions=False)
    check_labels(lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), classes=8)
    check_labels(lambda x: F.pad(x, (0, 0, 0, 0, -2, 2)), classes=0)


def test_use_of_padding() -> None:
    """An unread channel is unused, wherever padding moved it."""
    check_use(lambda x: F.pad(x, (1, 1)), [3], [3])
    check_use(lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)), [0, 3], [1])
    check_use(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [5], [5])


def test_zero_padded_channel_shortcut() -> None:
    """ResNet's option A: the shortcut skips every second position and gets zero channels on both sides."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.relu(m.stem(x))
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return m.head(torch.relu(m.norm(m.conv(x)) + short).mean((2, 3)))

    model = randomised(
        Net(
            forward,
            stem=nn.Conv2d(3, 4, 3, padding=1),
            conv=nn.Conv2d(4, 8, 3, stride=2, padding=1),
            norm=nn.BatchNorm2d(8),
            head=nn.Linear(8, 2),
        )
    )
    groups = {g.name: g for g in engine.dependency_groups(model, image())}
    assert groups["stem"].layers == ("stem", "conv") and groups["stem"].size == 4 and groups["stem"].reason is None
    masks = dead(model, {"stem": [0, 2], "conv": [2, 4, 0]}, bias=True)
    check_exact(model, masks, image(), image(10))
    plan = check_exact(model, engine.fix_mask_conflict(masks, model, image()), image(), image(10))
    assert plan.slices["stem.weight"].shape[0] == 2


def test_a_profile_needs_a_carrier() -> None:
    """Behind a pool that counts its padding a constant can only be carried: exact at another resolution."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.AvgPool2d(3, 1, 1), nn.Conv2d(6, 4, 1), Mean(), nn.Linear(4, 2))
    )
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}), image(), image(9))
    assert plan.slices["0.weight"].shape[0] == 4
    assert [f.name for f in plan.folds] == ["2.weight"]
