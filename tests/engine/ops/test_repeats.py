"""Ops that repeat entries, against running them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.ops.brute import check_constants, check_labels, check_use


def test_repeated_entries() -> None:
    """Each copy goes with its entry; repetitions that differ, or run over everything, keep the axis."""
    check_labels(lambda x: x.repeat_interleave(2, 1), classes=8)
    check_labels(lambda x: x.repeat_interleave(3, 2), classes=8)
    check_labels(lambda x: x.repeat_interleave(torch.tensor([1, 2] * 4), 1), classes=0)
    check_labels(lambda x: x.repeat_interleave(2), classes=0)
    check_use(lambda x: x.repeat_interleave(2, 1), columns=[0, 1, 2], unused=[0])


def test_tiles() -> None:
    """`tile` is `repeat` that may name the last dimensions only; each copy goes with its entry."""
    for f in (lambda x: x.tile(2, 1, 1), lambda x: x.tile(1, 2, 1, 1), lambda x: torch.tile(x, (2, 1, 1))):
        check_labels(f, classes=8)
        check_constants(f, constant=[0, 1, 2, 3, 8, 9, 10, 11])
        check_use(f, columns=[0, 1, 8], unused=[0])
    check_labels(lambda x: x.tile(3), classes=8)
    check_labels(lambda x: x.tile(2, 1, 1, 1, 1), classes=8)


@pytest.mark.parametrize("lead", [0, 1])
def test_tiles_over_channels_take_the_size_of_what_they_meet(lead: int) -> None:
    """A dimension of size 1 is repeated as often as there are channels, which are fewer afterwards."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        gate = x.sum(1, keepdim=True).tile(*[1] * lead, x.shape[1], 1, 1)
        return m.head((x * gate).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1]}, bias=True), image(), image(3))
    assert plan.slices["stem.weight"].shape[0] == 4
