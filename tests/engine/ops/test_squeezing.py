"""Squeezes: what they keep, and which dimensions must not become ones of size 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import check_exact


class Squeezed(nn.Module):
    """Three layers, with a squeeze between the first two."""

    def __init__(self, squeeze: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.squeeze = squeeze
        self.stem, self.head, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        pooled = self.stem(x).relu().mean((2, 3), keepdim=True)
        return self.last(self.head(self.squeeze(pooled)).relu())  # type: ignore[no-any-return]


def _masks(model: nn.Module, left: int) -> dict[str, dict[str, Tensor]]:
    kept = (torch.arange(6) < left).double()
    return {"stem": {"weight": kept.view(6, 1, 1, 1).expand(6, 3, 3, 3), "bias": kept}}


@pytest.mark.parametrize(
    ("squeeze", "left_of_one"),
    [(Tensor.squeeze, 6), (lambda x: x.squeeze((1, 2, 3)), 6), (lambda x: x.squeeze(3).squeeze(2), 1)],
)
def test_two_channels_are_left_where_one_would_go(squeeze: Callable[[Tensor], Tensor], left_of_one: int) -> None:
    """A single channel would go with the other dimensions of size 1; several are removed as anywhere."""
    model = Squeezed(squeeze).double()
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for left, expected in ((2, 2), (1, left_of_one)):
        plan = check_exact(model, _masks(model, left), x, x[:, :, 1:])
        remaining = plan.slices["stem.weight"].shape[0] if "stem.weight" in plan.slices else 6
        assert remaining == expected


def test_a_weight_that_is_squeezed() -> None:
    """A convolution over single positions as a product: neither of the two numbers of channels becomes 1."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.linear(x.movedim(1, -1), self.stem.weight.squeeze(), self.stem.bias)
            return self.head(h.relu().movedim(-1, 1))  # type: ignore[no-any-return]

    model = Product().double()
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = torch.zeros(6).double()
    kept[0] = 1
    masks = {"stem": {"weight": kept.view(6, 1, 1, 1).expand(6, 3, 1, 1), "bias": kept}}
    check_exact(model, masks, x)
    assert "stem" not in engine.not_safe_to_prune(model, x)
