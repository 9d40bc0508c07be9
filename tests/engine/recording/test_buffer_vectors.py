"""Vectors that are made of buffers lose the entries of channels that go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording.buffer_vectors import BufferVectors
from tests.engine.exactness import channel_masks, check_exact, randomised


class Frozen(nn.Module):
    """A batch norm of buffers, as detectors have them in their backbones."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels, generator=torch.Generator().manual_seed(0)) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised features."""
        w, b, m, v = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_mean, self.running_var))
        scale = w * (v + 1e-5).rsqrt()
        return x * scale + (b - m * scale)


class Sized(Frozen):
    """Lays the vectors out by a size of the input, and keeps a table beside them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("table", torch.linspace(0.1, 1.7, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Return scaled features."""
        scale = (self.weight / self.running_var).view(1, x.shape[1], 1, 1)
        return x * scale[0] + (self.table[None] * self.table[:, None]).sum()


class Column(Frozen):
    """Adds a vector in another layout, by indexing."""

    def forward(self, x: Tensor) -> Tensor:
        """Return shifted features."""
        return x - (self.bias + self.running_mean)[:, None, None]


def _net(kind: Callable[[int], nn.Module]) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), kind(8), nn.ReLU(), nn.Conv2d(8, 6, 1, bias=False), kind(6), nn.Conv2d(6, 2, 1)]
    return randomised(nn.Sequential(*layers))


@pytest.mark.parametrize("kind", [Frozen, Sized, Column])
def test_a_frozen_norm_is_cut(kind: Callable[[int], nn.Module]) -> None:
    """Its buffers too, and the network computes the same."""
    model = _net(kind)
    x = torch.randn(1, 3, 7, 7, dtype=torch.float64)
    masks = dict(engine.fix_mask_conflict(channel_masks(model, 0), model, x))
    plan = check_exact(model, masks, x, torch.randn(2, 3, 9, 6, dtype=torch.float64))
    assert {"0.weight", "3.weight"} & plan.slices.keys()
    assert any(name.startswith(("1.", "4.")) for name in plan.slices)


def test_without_the_record_all_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors would be tables of a fixed size."""
    monkeypatch.setattr(BufferVectors, "add", lambda self, made: None)
    model = _net(Frozen)
    x = torch.randn(1, 3, 7, 7, dtype=torch.float64)
    assert not check_exact(model, channel_masks(model, 0), x).slices


def test_a_table_is_no_vector() -> None:
    """Products of tables, and what is sorted or summed, is data as before."""
    model = _net(Sized)
    graph = engine.trace(model, torch.zeros(1, 3, 7, 7, dtype=torch.float64))
    assert not any("table" in name for name in graph.stored)
