"""Traps: code that pads, cuts or resizes a picture in some rounds, at some sizes, or in no recording."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from torch import Tensor, nn

from engine.flow.effects import Effect, effects
from engine.observations.assumptions import Assumptions
from engine.unrecorded import untaken
from tests.engine.traps.trap import Ablation, Trap, not_contiguous, once

__all__ = ["ABLATIONS", "TRAPS"]


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in ((3, 4), (4, 6)))
        self.bottom = nn.Conv2d(6, 8, 3, padding=1)
        self.ups = nn.ModuleList()
        for i, o in ((8, 6), (6, 4)):
            self.ups.append(nn.ConvTranspose2d(i, o, 2, 2))
            self.ups.append(nn.Sequential(nn.Conv2d(2 * o, o, 3, padding=1), nn.ReLU()))
        self.head = nn.Conv2d(4, 2, 1)

    def encoded(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        return self.bottom(x), skips

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.encoded(x)
        for n in range(0, len(self.ups), 2):
            x = self.ups[n](x)
            skip = skips[-1 - n // 2]
            if x.shape != skip.shape:
                x = F.interpolate(x, size=skip.shape[2:])
            x = self.ups[n + 1](torch.cat((skip, x), dim=1))
        return self.head(x)


class _CroppedUNet(_UNet):
    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.encoded(x)
        for n in range(0, len(self.ups), 2):
            x, skip = self.ups[n](x), skips.pop()
            if x.shape[2:] != skip.shape[2:]:
                skip = skip[:, :, : x.shape[2], : x.shape[3]]
            x = self.ups[n + 1](torch.cat((skip, x), dim=1))
        return self.head(x)


class _ResizedUNet(_UNet):
    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.encoded(x)
        for n in range(0, len(self.ups), 2):
            x, skip = self.ups[n](x), skips.pop()
            if x.shape != skip.shape:
                x = TF.resize(x, size=list(skip.shape[2:]))
            x = self.ups[n + 1](torch.cat((skip, x), dim=1))
        return self.head(x)


class _Same(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        h, w = x.size()[-2:]
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        ph = max((math.ceil(h / sh) - 1) * sh + kh - h, 0)
        pw = max((math.ceil(w / sw) - 1) * sw + kw - w, 0)
        if ph > 0 or pw > 0:
            x = F.pad(x, [pw // 2, pw - pw // 2, ph // 2, ph - ph // 2])
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _Strided(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(_Same(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), _Same(6, 4, 3, 2), nn.ReLU(), _Same(4, 2, 1))


class _Between(nn.Module):
    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        self.f, self.last = f, last
        self.first = nn.Conv2d(3, 8, 3, padding=1) if isinstance(last, nn.Conv2d) else nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.f(self.first(x), x))


class _Narrow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., :4])


def _resized(y: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = F.interpolate(y, size=(y.shape[2], 5))
    return y


def _resized_along_the_last(y: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = F.interpolate(F.interpolate(y, scale_factor=(1.0, 0.5)), scale_factor=(1.0, 2.0))
    return y


def _cut_along_the_last(y: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y[..., 1:, :4]
    return y


def _padded_and_shifted(y: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = F.pad(y, (1, 1, 1, 1)) + 1
    return y


def _padded_along_channels(y: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = F.pad(y, (0, 0, 0, 0, 1, -1))
    return y


def _of(shape: tuple[int, ...]) -> Callable[[nn.Module], Tensor]:
    return lambda model: torch.zeros(shape, dtype=torch.float64)


_EVEN = _of((2, 3, 8, 8))
_OTHERS = [once(2, 3, 6, 4), not_contiguous(2, 3, 6, 4), not_contiguous(1, 3, 5, 9)]

TRAPS = [
    *(
        Trap(
            name=f"a U-Net {what} in the rounds whose sizes differ",
            source="aladdinpersson/Machine-Learning-Collection semantic_segmentation_unet/model.py, and its forks",
            make=make,
            example=_EVEN,
            uses=[once(2, 3, *size) for size in ((8, 8), (6, 6), (5, 9), (7, 4), (16, 13))],
            shrinks="repaired",
        )
        for what, make in (("interpolates", _UNet), ("resizes", _ResizedUNet), ("cuts", _CroppedUNet))
    ),
    Trap(
        name="cuts along the channels in another layout",
        source="a slice on channels last, of a width that the layer behind does not have",
        make=lambda: _Between(_cut_along_the_last, _Narrow()),
        example=_of((2, 4, 5, 3)),
        uses=[once(2, 5, 4, 3), not_contiguous(2, 5, 4, 3)],
    ),
    Trap(
        name="pads to whole strides where there is anything to pad",
        source="lukemelas/EfficientNet-PyTorch utils.py Conv2dDynamicSamePadding",
        make=_Strided,
        example=_EVEN,
        uses=[once(2, 3, *size) for size in ((9, 9), (8, 8), (5, 7), (1, 1), (2, 3))],
        shrinks="repaired",
    ),
    Trap(
        name="resizes pictures in another layout",
        source="a resize behind a condition that is not on sizes",
        make=lambda: _Between(_resized, nn.Conv2d(8, 4, 3, padding=1)),
        example=_EVEN,
        uses=_OTHERS,
        shrinks="repaired",
    ),
    Trap(
        name="resizes along the channels in another layout",
        source="F.interpolate on channels last, which runs over the last dimensions",
        make=lambda: _Between(_resized_along_the_last, nn.Linear(8, 4)),
        example=_of((2, 4, 4, 3)),
        uses=[once(2, 5, 4, 3), not_contiguous(2, 5, 4, 3)],
    ),
    Trap(
        name="pads and shifts in another layout",
        source="F.pad on channels last, and a sum behind it",
        make=lambda: _Between(_padded_and_shifted, nn.Conv2d(8, 4, 3, padding=1)),
        example=_EVEN,
        uses=_OTHERS,
        kept="its inputs keep all channels",
    ),
    Trap(
        name="pads along the channels in another layout",
        source="temporal shift (mit-han-lab/temporal-shift-module) by F.pad",
        make=lambda: _Between(_padded_along_channels, nn.Conv2d(8, 4, 3, padding=1)),
        example=_EVEN,
        uses=_OTHERS,
        kept="its inputs keep all channels",
        seeds=(1, 2, 3, 4),
    ),
]


def _channels_stay(patch: pytest.MonkeyPatch) -> None:
    def move(self: Assumptions, values: Any, reason: str, place: str | None = None) -> None:
        self.vary(values, zeros_stay=True)

    patch.setattr(Assumptions, "move", move)


def _all_pads_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(untaken, "effects", functools.partial(_moving, effects))


def _moving(effects: Callable[..., Any], *arguments: Any) -> Any:
    nodes, functions, *others = arguments
    return effects(nodes, replace(functions, moves=lambda call: True), *others)


def _sums_move_as_well(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Effect, "and_then", max)


ABLATIONS = [
    Ablation(
        "resizing runs over the last dimensions", _channels_stay, "resizes along the channels in another layout", True
    ),
    Ablation("padding may run over channels", _all_pads_move, "pads along the channels in another layout", True),
    Ablation("what is padded and shifted is no zero", _sums_move_as_well, "pads and shifts in another layout", True),
]
