"""Traps: scales, shifts and statistics that a small network computes for a layer of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis.use import Use
from tests.engine.exactness import Masks, channel_masks, column_masks
from tests.engine.traps.trap import Ablation, Trap
from tests.engine.traps.trap import Use as Called

__all__ = ["ABLATIONS", "TRAPS"]

_Mix = Callable[["_Conditioned", Tensor, Tensor, Tensor], Tensor]


class _Conditioned(nn.Module):
    """A layer whose parameters two linear layers compute from what a small network makes of the picture."""

    mean: Tensor
    variance: Tensor

    def __init__(self, mix: _Mix, asks: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3)
        self.inner = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 6), nn.Tanh())
        self.scale, self.shift = nn.Linear(6, 8), nn.Linear(6, 8)
        self.register_buffer("mean", torch.linspace(-0.5, 0.5, 8))
        self.register_buffer("variance", torch.linspace(0.5, 1.5, 8))
        self.mix, self.asks = mix, asks

    def forward(self, x: Tensor, adapt: bool = False) -> Tensor:
        h = self.stem(x)
        if adapt or not self.asks:
            z = self.inner(x.mean((0, 2, 3)))
            h = self.mix(self, h, self.scale(z), self.shift(z))
        return self.head(h.relu())  # type: ignore[no-any-return]


def _batch(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(h, net.mean, net.variance, scale, shift)


def _statistics(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(h, scale, shift.exp())


def _group(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.group_norm(h, 2, scale, shift)


def _instance(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.instance_norm(h, weight=scale, bias=shift)


def _layer(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(h.movedim(1, -1), (8,), scale, shift).movedim(-1, 1)


def _depthwise(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.conv2d(h, scale.view(8, 1, 1, 1), shift, groups=8)


def _row(net: _Conditioned, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return h + torch.addmm(shift, h.mean((2, 3)), torch.diag(scale))[:, :, None, None]


def _called(*shape: int, **options: Any) -> Called:
    def use(model: nn.Module) -> Any:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(x, **options)

    return use


def _masks(model: nn.Module, seed: int) -> Masks:
    """Mask units of some layers, and what the layers behind the small network read."""
    columns, channels = column_masks(model, seed), channel_masks(model, seed)
    return {**{name: channels[name] for name in ("inner.0", "inner.2")}, **{n: columns[n] for n in ("scale", "shift")}}


def _trap(name: str, source: str, mix: _Mix, asks: bool = False) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=lambda: _Conditioned(mix, asks),
        example=lambda model: torch.randn(2, 3, 8, 8, dtype=torch.float64),
        uses=[_called(1, 3, 9, 6), _called(3, 3, 8, 8, adapt=True), _called(3, 3, 8, 8, adapt=False)],
        masks=_masks,
        shrinks=True,
    )


TRAPS = [
    _trap("a norm whose scale is computed", "conditional batch norm by F.batch_norm", _batch),
    _trap("a norm whose scale is computed, on demand", "conditional batch norm by F.batch_norm", _batch, asks=True),
    _trap("a norm whose statistics are computed", "statistics of another domain", _statistics),
    _trap("a group norm whose scale is computed", "feature-wise modulation", _group),
    _trap("an instance norm whose scale is computed", "AdaIN by F.instance_norm", _instance),
    _trap("a layer norm whose scale is computed", "adaptive layer norm by F.layer_norm", _layer),
    _trap("a convolution whose bias is computed", "dynamic filters with biases, conditional convolution", _depthwise),
    _trap("a convolution whose bias is computed, on demand", "dynamic filters with biases", _depthwise, asks=True),
    _trap("a product whose bias is computed", "torch.addmm of a generated bias", _row),
]


def _stored_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Use, "add_beside", lambda self, values, used: None)


ABLATIONS = [
    Ablation("what is computed in the place of parameters is used", _stored_alone,
             "a norm whose scale is computed, on demand"),
    Ablation("what is computed in the place of a bias is used", _stored_alone,
             "a convolution whose bias is computed, on demand"),
]  # fmt: skip
