"""Traps: modules and tensors that a forward copies; a copy of a tensor without a gradient runs no op."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine.numbers.replaced_functions
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Blocks(nn.Module):
    """A convolutional network whose middle block is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.block = nn.Sequential(nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5), nn.ReLU())
        self.register_buffer("scale", torch.rand(5) + 0.5)
        self.head = nn.Linear(5, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.stem(x)))

    def scores(self, h: Tensor) -> Tensor:
        return self.head(h.mean((2, 3)))  # type: ignore[no-any-return]


class _Teacher(_Blocks):
    """BYOL's target network, copied on first use and compared with the online one."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.scores(self.block(h) + copy.deepcopy(self.block)(h.flip(-1)))


class _OnlyTheCopy(_Blocks):
    """An inner loop that adapts a copy of the block (MAML), and never runs the block."""

    def forward(self, x: Tensor) -> Tensor:
        block = copy.deepcopy(self.block)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(0.9)
        return self.scores(block(self.features(x)))


class _StatisticsOfTheCopy(_Blocks):
    """Adapts the statistics of a copy to the batch (test-time adaptation), and uses them."""

    def forward(self, x: Tensor) -> Tensor:
        block = copy.deepcopy(self.block).train()
        h = block(self.features(x))
        return self.scores(h * block[1].running_mean[:, None, None])


class _Features(_Blocks):
    """Keeps a copy of features, and changes it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.block(self.features(x)).detach()]
        others = copy.deepcopy(kept)
        others[0].mul_(2.0)
        return self.scores(kept[0] + others[0] * copy.deepcopy(self.scale)[:, None, None])


class _BothViews(_Blocks):
    """Copies a tensor together with a view of it: the copies share memory, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.features(x)).detach()
        whole, row = copy.deepcopy((h, h[:, :, :1]))
        row.add_(1.0)
        return self.scores(whole)


class _Weight(_Blocks):
    """Copies a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(F.relu(F.conv2d(self.features(x), copy.deepcopy(self.block[0].weight))))


def _trap(name: str, source: str, make: Callable[[], nn.Module], refused: str | None = None) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.randn(2, 3, 5, 5, dtype=torch.float64),
        uses=[once(3, 3, 5, 5, seed=3), once(2, 3, 6, 4, seed=4)],
        refused=refused,
        shrinks=refused is None,
    )


TRAPS = [
    _trap("a copied block beside its original", "BYOL, copies of the online network", _Teacher),
    _trap("a copied block alone", "learn2learn, clone_module", _OnlyTheCopy),
    _trap("a copied norm in train mode", "Tent, test-time adaptation on a copy", _StatisticsOfTheCopy),
    _trap("copied features", "deepcopy of a list of states", _Features),
    _trap("a copied weight", "deepcopy(layer.weight)", _Weight),
    _trap("copies that share memory", "deepcopy of a tensor and a view", _BothViews, refused="share memory"),
]


def _plain(patch: pytest.MonkeyPatch) -> None:
    module = engine.numbers.replaced_functions
    patch.setattr(module, "_followed_deepcopy", lambda program: module._plain_deepcopy)


ABLATIONS = [Ablation("copies of tensors", _plain, "copies that share memory")]
