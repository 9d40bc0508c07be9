"""Sorting and choosing against running them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import nms

import engine
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.ops.brute import check_labels, check_use

ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cummax": lambda x, d: x.cummax(d)[0],
    "kthvalue": lambda x, d: x.kthvalue(2, d, keepdim=True)[0],
    "max": lambda x, d: x.max(d, keepdim=True)[0],
    "median": lambda x, d: x.median(d, keepdim=True)[0],
    "min": lambda x, d: x.min(d, keepdim=True)[0],
    "mode": lambda x, d: x.round().mode(d, keepdim=True)[0],
    "sort": lambda x, d: x.sort(d)[0],
    "topk": lambda x, d: x.topk(2, d)[0],
}


@pytest.mark.parametrize("name", ALONG)
def test_other_axes_pass(name: str) -> None:
    """Along positions, channel by channel; along channels nothing can go."""
    check_labels(lambda x: ALONG[name](x, 2), classes=8, positions=False)
    check_use(lambda x: ALONG[name](x, 3), columns=[1, 7], unused=[1, 7])
    check_labels(lambda x: ALONG[name](x, 1), classes=0)


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("bias", [True, False])
def test_equal_entries_stay_what_they_are(name: str, bias: bool) -> None:
    """In any order: dead channels go, whether they are zero or a constant."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(ALONG[name](m.stem(x), 2).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1, 5]}, bias=bias), image(), image(9, batch=3))
    assert name == "mode" or plan.slices["stem.weight"].shape[0] == 5


def test_which_of_equal_entries_is_the_first_is_unknown() -> None:
    """That is up to the device."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(m.stem(x).argmax(2).double().mean(2) + m.stem(x).flatten(2).max(2)[1].double())

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1, 5]}, bias=True), image(), image(9, batch=3))
    assert "stem.weight" not in plan.slices


def test_an_axis_that_disappears() -> None:
    """Without ``keepdim`` the channels move."""
    check_labels(lambda x: x.flatten(2).max(2)[0], classes=8)
    check_labels(lambda x: x.permute(0, 2, 3, 1).max(1)[0].max(1)[0], classes=8)
    check_labels(lambda x: x.max(), classes=0)


def test_the_larger_of_two_tensors() -> None:
    """Entry by entry, as a sum: what meets goes together."""
    check_labels(torch.max, classes=8, count=2)
    check_labels(torch.min, classes=8, count=2)
    check_use(lambda x: torch.max(x, x.flip(2)), columns=[1, 7], unused=[1, 7])


def test_chosen_channels_stay() -> None:
    """Which channel is the largest depends on all of them, and the reason says so."""
    model = Net(lambda m, x: m.stem(x).argmax(1), stem=nn.Conv2d(3, 6, 1))
    group = engine.dependency_groups(model, image().float())[0]
    assert group.reason is not None and "argmax" in group.reason and "puts it in order" in group.reason


@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")  # torchvision's
def test_suppressed_boxes() -> None:
    """Boxes and scores stay; features in front of them go."""

    def forward(m: Net, x: Tensor) -> Tensor:
        features = torch.relu(m.stem(x)).mean((2, 3))
        corners, sizes = m.boxes(features).unflatten(1, (2, 2)).unbind(1)
        found = torch.cat([corners, corners + sizes.abs()], 1)
        return found[nms(found, m.scores(features).amax(1), 0.5)]

    parts = {"stem": nn.Conv2d(3, 6, 3), "boxes": nn.Linear(6, 4), "scores": nn.Linear(6, 2)}
    model = randomised(Net(forward, **parts))
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert reasons["stem"] is None and reasons["boxes"] and reasons["scores"]
    check_exact(model, dead(model, {"stem": [0, 1, 5]}), image(), image(9, batch=3))
