"""Regions of interest and sampling grids against running them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, roi_align, roi_pool

import engine
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, constants_of, dead, image
from tests.engine.ops.brute import check_labels, check_use

# The second and third reach out of the picture.
BOXES = [torch.tensor([[0.0, 0.0, 3.0, 3.0], [1.0, -2.0, 6.0, 2.0]]), torch.tensor([[-3.0, 1.0, 2.0, 9.0]])]


def boxes(x: Tensor) -> list[Tensor]:
    """Boxes for the two images of a batch."""
    return [b.to(x) for b in BOXES]


def grid(x: Tensor) -> Tensor:
    """Places, some of them outside."""
    return torch.linspace(-1.3, 1.3, 18).view(1, 3, 3, 2).to(x).expand(x.shape[0], -1, -1, -1)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "align": lambda x: roi_align(x, boxes(x), 2),
    "align with half a pixel": lambda x: roi_align(x, boxes(x), 2, sampling_ratio=2, aligned=True),
    "pool": lambda x: roi_pool(x, boxes(x), 2),
    "zeros outside": lambda x: F.grid_sample(x, grid(x), align_corners=False),
    "borders outside": lambda x: F.grid_sample(x, grid(x), padding_mode="border", align_corners=True),
    "nearest": lambda x: F.grid_sample(x, grid(x), mode="nearest", align_corners=False),
    "bicubic": lambda x: F.grid_sample(x, grid(x), mode="bicubic", padding_mode="reflection", align_corners=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_channels_pass(name: str) -> None:
    """Channel by channel: eight classes go in and come out; what nobody reads is not used."""
    check_labels(CALLS[name], classes=8, positions=False)
    check_use(CALLS[name], columns=[1, 7], unused=[1, 7])


@pytest.mark.parametrize("name", CALLS)
def test_a_dead_channel_is_its_constant_times_a_common_map(name: str) -> None:
    """What a place outside of the picture makes of a constant, it makes of all of them."""
    model = Net(lambda m, x: CALLS[name](torch.sigmoid(m.stem(x))), stem=nn.Conv2d(3, 4, 1)).double()
    constants = constants_of(model, image(4), dead(model, {"stem": [0, 1]}))
    out = constants.graph.outputs[0]
    known = constants.along(out, 1)
    with torch.no_grad():
        model.stem.weight[:2] = 0
        found = model(image(4))[:, :2] / known[:2].view(1, 2, 1, 1)
    assert constants.has_profile(out) and known.isnan().tolist() == [False, False, True, True]
    torch.testing.assert_close(found[:, 0], found[:, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_any_masks(name: str, kind: str) -> None:
    """Exact behind a sigmoid, whose constants are not zero, in front of a linear layer over the flat region."""
    size = CALLS[name](torch.zeros(2, 8, 4, 4)).shape[2:].numel()
    model = randomised(
        Net(
            lambda m, x: m.head(CALLS[name](torch.sigmoid(m.stem(x))).flatten(1)),
            stem=nn.Conv2d(3, 8, 3, padding=1),
            head=nn.Linear(8 * size, 2),
        )
    )
    check_exact(model, KINDS[kind](model, 1), image(4), image(8))


def test_features_of_several_levels() -> None:
    """torchvision's pooler writes regions of each level into one tensor: the channels of all levels go together."""

    def forward(m: Net, x: Tensor) -> Tensor:
        levels = {"0": m.one(x), "1": m.two(F.avg_pool2d(x, 2))}
        places = [torch.tensor([[0.0, 0, 4, 4], [0, 0, 200, 200]]).to(x)] * x.shape[0]
        return m.head(m.pool(levels, places, [(256, 256)] * x.shape[0]).flatten(1))

    parts = {"one": nn.Conv2d(3, 6, 3, padding=1), "two": nn.Conv2d(3, 6, 1), "head": nn.Linear(6 * 4, 2)}
    pool = MultiScaleRoIAlign(["0", "1"], 2, 2, canonical_scale=60, canonical_level=4)
    model = randomised(Net(forward, pool=pool, **parts))
    group = engine.dependency_groups(model, image(64))[0]
    assert group.layers == ("one", "two") and group.reason is None
    masks = engine.group_masks([group], {group.name: torch.tensor([True, False] * 3)})
    plan = check_exact(model, masks, image(64), image(64, batch=3))
    assert plan.slices["head.weight"].shape == (2, 12)
