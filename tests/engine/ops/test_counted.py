"""Products of which no channel is removed: their counts, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine

VECTOR, MATRIX, CUBE = torch.rand(4), torch.rand(4, 6), torch.rand(3, 4, 4)

CALLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "addmv": (lambda h: torch.addmv(torch.zeros(5), h, VECTOR), 20),
    "outer": (lambda h: torch.outer(h[0], h[1]), 16),
    "ger": (lambda h: torch.ger(h[0], h[1]), 16),
    "addr": (lambda h: torch.addr(torch.zeros(4, 4), h[0], h[1]), 16),
    "addbmm": (lambda h: torch.addbmm(torch.zeros(5, 6), h[None], MATRIX[None]), 120),
    "inner": (lambda h: torch.inner(h, h), 100),
    "inner of a number": (lambda h: torch.inner(h, torch.tensor(2.0)), 20),
    "tensordot": (lambda h: torch.tensordot(h, MATRIX, 1), 120),
    "tensordot of all": (lambda h: torch.tensordot(h, h, ([0, 1], [0, 1])), 20),
    "vecdot": (lambda h: torch.linalg.vecdot(h, h[:1]), 20),
    "bilinear": (lambda h: F.bilinear(h, h, CUBE), 2 * 5 * 3 * 16),
    "conv_tbc": (lambda h: torch.conv_tbc(h[None], torch.rand(1, 4, 3), torch.zeros(3)), 60),
}


class Net(nn.Module):
    """A layer, and a product of its output."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.product = nn.Linear(4, 4), product

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return self.product(self.layer(x))


@pytest.mark.parametrize("name", CALLS)
def test_counted(name: str) -> None:
    """One for each multiplication of the sum; they counted for nothing."""
    product, macs = CALLS[name]
    counted = engine.count_flops_params(Net(product), torch.rand(5, 4), verbose=False, batch_dim=None)[0]
    assert counted == 5 * 4 * 4 + macs


def test_channels_stay() -> None:
    """With the reason that they had without a rule."""
    net = Net(lambda h: torch.inner(h, h))
    assert (engine.dependency_groups(net, torch.rand(5, 4))[0].reason or "").startswith("inner has no rule")
