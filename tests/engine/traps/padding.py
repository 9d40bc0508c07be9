"""Traps: borders whose width follows the size of the input, so that it is nothing at the example's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis import constants as known
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS", "Between", "at"]


class Between(nn.Module):
    """A function between two layers: the channels in front of it are masked, the layer behind it reads them."""

    def __init__(
        self, f: Callable[[Tensor], Any], head: nn.Module | None = None, stem: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1) if stem is None else stem
        self.f = f
        self.head = nn.Conv2d(8, 4, 3) if head is None else head

    def forward(self, x: Tensor) -> Any:
        """Return what the layer behind makes of it."""
        return self.head(self.f(self.stem(x)))


def at(*sizes: tuple[int, ...]) -> list[Use]:
    """Return one use per shape of the input."""
    return [once(*size) for size in sizes]


def trap(name: str, source: str, f: Callable[[Tensor], Any], *, size: int = 8, **more: Any) -> Trap:
    """Return a trap that is traced with square pictures, and used at odd, smaller and larger ones, batch 1 included."""
    head, stem = more.pop("head", None), more.pop("stem", None)
    uses = more.pop("uses", None) or at((1, 3, size, size), (2, 3, size + 3, size + 1), (3, 3, size - 2, 2 * size + 5))
    return Trap(
        name=name,
        source=source,
        make=lambda: Between(f, None if head is None else head(), None if stem is None else stem()),
        example=lambda model: torch.zeros(2, 3, size, size, dtype=torch.float64),
        uses=uses,
        shrinks=more.pop("shrinks", True),
        **more,
    )


def _full_windows(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    return F.pad(x, (0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))


def _full_windows_where_needed(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    pad_h, pad_w = (4 - height % 4) % 4, (4 - width % 4) % 4
    if pad_h > 0 or pad_w > 0:
        x = F.pad(x, (0, pad_w, 0, pad_h))
    return x


def _same(x: Tensor) -> Tensor:
    """TensorFlow's padding for a kernel of 3 and a stride of 2."""

    def amount(size: int) -> int:
        return max((math.ceil(size / 2) - 1) * 2 + 3 - size, 0)

    pad_h, pad_w = amount(x.shape[-2]), amount(x.shape[-1])
    return F.pad(x, [pad_w // 2, pad_w - pad_w // 2, pad_h // 2, pad_h - pad_h // 2])


def _same_rounded(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    pad_h = int(math.ceil(height / 4) * 4) - height
    pad_w = int(math.ceil(width / 4) * 4) - width
    return F.pad(x, (0, pad_w, 0, pad_h))


def _centred(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    new_h, new_w = ((height + 7) // 8) * 8, ((width + 7) // 8) * 8
    top, left = (new_h - height) // 2, (new_w - width) // 2
    return F.pad(x, (left, new_w - width - left, top, new_h - height - top))


def _in_numpy_style(x: Tensor) -> Tensor:
    _, remainder = divmod(x.shape[-1], 4)
    return F.pad(x, (0, 4 - remainder if remainder else 0, 0, 0))


def _value(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 4, 0, 0), value=0.5)


def _reflected(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 4, 0, -x.shape[-2] % 4), mode="reflect")


def _concatenated(x: Tensor) -> Tensor:
    """Padding by hand."""
    missing = -x.shape[-1] % 4
    return torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], -1)


def _cropped(x: Tensor) -> Tensor:
    """Negative padding cuts down to a multiple of 4, and the rest is filled again."""
    extra = x.shape[-1] % 4
    return F.pad(F.pad(x, (0, -extra)), (0, extra))


def _windows_and_back(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    x = F.pad(x, (0, -width % 4, 0, -height % 4))
    high, wide = x.shape[-2:]
    windows = x.view(batch, channels, high // 4, 4, wide // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, channels)
    windows = windows - windows.mean(1, keepdim=True) * 0.5
    back = windows.view(batch, high // 4, wide // 4, 4, 4, channels).permute(0, 5, 1, 3, 2, 4)
    return back.reshape(batch, channels, high, wide)[:, :, :height, :width]


class _Skip(nn.Module):
    """A U-Net of one level that pads what it has upsampled to the size of the skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Conv2d(12, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x).relu()
        up = self.up(self.deep(F.max_pool2d(skip, 1)).sigmoid()[:, :, : x.shape[2] // 2, : x.shape[3] // 2])
        dy, dx = skip.size(2) - up.size(2), skip.size(3) - up.size(3)
        up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.head(torch.cat([skip, up], 1))


class _Nearest(nn.Module):
    """The same with nearest upsampling, so that what is padded is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(3, 8, 1)
        self.skip = nn.Conv2d(3, 4, 1)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        up = F.interpolate(self.deep(F.avg_pool2d(x, 2)), scale_factor=2)
        skip = self.skip(x)
        up = F.pad(up, [0, skip.size(3) - up.size(3), 0, skip.size(2) - up.size(2)])
        return self.head(torch.cat([skip, up], 1))


class _Framed(nn.Module):
    """A margin that may be set, of zeros; and one by reflection, by which the last frame is filled, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.filled = nn.Conv1d(3, 8, 3), nn.Conv1d(8, 6, 4, stride=2)
        self.head, self.left = nn.Conv1d(6, 4, 4, stride=2), 0

    def delay(self, left: int) -> None:
        """Set how much there is in front."""
        self.left = left

    def forward(self, x: Tensor) -> Any:
        """Return what the layers make of full frames."""
        y = self.stem(x).sigmoid()
        y = self.filled(_framed(y, (self.left, 0), "constant")).sigmoid()
        return self.head(_framed(y, (self.left, _missing(self.head, y)), "reflect"))


def _missing(layer: nn.Conv1d, y: Tensor) -> int:
    kernel, stride = layer.kernel_size[0], layer.stride[0]
    frames = (y.shape[-1] - kernel) / stride + 1
    return (math.ceil(frames) - 1) * stride + kernel - y.shape[-1]


def _framed(y: Tensor, margins: tuple[int, int], mode: str) -> Tensor:
    left, right = margins
    assert left >= 0 and right >= 0
    return F.pad(y, margins, mode)


def _delayed(net: nn.Module) -> Any:
    net.delay(3)  # type: ignore[operator]
    return once(2, 3, 21)(net)


class _Causal(nn.Module):
    """A convolution over time, padded on the left by as much as is missing from a whole number of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 8, 1)
        self.conv = nn.Conv1d(8, 6, 4, stride=4)
        self.head = nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        frames = (x.shape[-1] - 4 + 0) / 4 + 1
        ideal = (math.ceil(frames) - 1) * 4 + 4
        return self.head(self.conv(F.pad(x, (ideal - x.shape[-1], 0))))


class _Pooled(nn.Module):
    """Tokens, padded to a whole number of blocks, with a mean over each block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        return self.head(x.view(x.shape[0], -1, 4, x.shape[2]).mean(2))


class _PaddedByTheLayer(nn.Module):
    """A layer whose own padding follows the size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.conv = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = (-x.shape[-2] % 4, -x.shape[-1] % 4)
        return F.conv2d(self.stem(x), self.conv.weight, self.conv.bias, padding=padding)


_TOKENS = at((2, 7, 3), (1, 8, 3), (3, 13, 3), (1, 4, 3))
_TIMES = at((2, 3, 9), (1, 3, 8), (3, 3, 14))


class _Dilated(nn.Module):
    """Pads by the dilation of a layer, and writes to the result of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 4, 1)
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=d) for d in (1, 2))

    def forward(self, x: Tensor) -> Any:
        """Return the result at each position."""
        h = self.stem(x)
        for layer in self.layers:
            y = layer(F.pad(h, (layer.dilation[0], 0)))
            y += 1.0
            h = torch.tanh(y)
        return self.head(h)


TRAPS = [
    trap(
        "pads to full windows",
        "torchvision swin_transformer.py shifted_window_attention; segment_anything image_encoder.py window_partition",
        _full_windows,
    ),
    trap(
        "pads to full windows, head of single elements",
        "mmdetection swin.py, PatchEmbed; detectron2 ViTDet utils.window_partition",
        _full_windows,
        head=lambda: nn.Conv2d(8, 4, 1),
    ),
    trap(
        "pads where it is needed",
        "segment_anything image_encoder.py: if pad_h > 0 or pad_w > 0",
        _full_windows_where_needed,
        head=lambda: nn.Conv2d(8, 4, 1),
    ),
    trap("pads as TensorFlow does", "timm layers/padding.py pad_same", _same, size=9),
    trap(
        "pads to a rounded multiple",
        "ESRGAN and SwinIR inference scripts: int(math.ceil(h / 4) * 4)",
        _same_rounded,
        head=lambda: nn.Conv2d(8, 4, 1),
    ),
    trap("pads on both sides", "RAFT utils.py InputPadder; segmentation_models.pytorch", _centred),
    trap("pads by a remainder of divmod", "common in audio code", _in_numpy_style, head=lambda: nn.Conv2d(8, 4, 1)),
    trap("pads with a number", "letterbox of YOLO models", _value, shrinks=False),
    trap("pads by reflection", "SwinIR network_swinir.py check_image_size", _reflected),
    trap("pads by concatenation", "TemporalShift, wav2vec pad_to_multiple", _concatenated, shrinks=False),
    trap("cuts to a multiple and fills up again", "vit-pytorch crop to patch size", _cropped),
    trap(
        "windows and back",
        "SAM image_encoder.py window_partition / window_unpartition",
        _windows_and_back,
        head=lambda: nn.Conv2d(8, 4, 1),
        shrinks="repaired",
    ),
    Trap(
        name="padding of the layer follows the size",
        source="EfficientNet-PyTorch utils.py Conv2dDynamicSamePadding, with padding as an argument",
        make=_PaddedByTheLayer,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=at((1, 3, 8, 8), (2, 3, 11, 9), (3, 3, 6, 21)),
        shrinks=True,
    ),
    Trap(
        name="a decoder pads to its skip connection",
        source="milesial/Pytorch-UNet unet_parts.py Up.forward",
        make=_Skip,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=at((1, 3, 9, 8), (2, 3, 11, 13), (1, 3, 6, 7)),
        shrinks=True,
    ),
    Trap(
        name="nearest upsampling padded to its skip connection",
        source="milesial/Pytorch-UNet with bilinear=True; monai UpCat",
        make=_Nearest,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=at((1, 3, 9, 8), (2, 3, 11, 13), (1, 3, 6, 7)),
        shrinks=True,
    ),
    Trap(
        name="pads on the left to whole frames",
        source="facebookresearch/encodec modules/conv.py get_extra_padding_for_conv1d",
        make=_Causal,
        example=lambda model: torch.zeros(2, 3, 8, dtype=torch.float64),
        uses=_TIMES,
        shrinks=True,
    ),
    Trap(
        name="pads by a dilation before a result is written to",
        source="WaveNet vocoders: y = conv(F.pad(x, (conv.dilation[0], 0))); y += condition",
        make=_Dilated,
        example=lambda model: torch.zeros(2, 3, 8, dtype=torch.float64),
        uses=_TIMES,
        shrinks="repaired",
    ),
    Trap(
        name="pads by an amount that may be set",
        source="facebookresearch/encodec modules/conv.py, math.ceil of frames; F.pad in reflect mode",
        make=_Framed,
        example=lambda model: torch.zeros(2, 3, 20, dtype=torch.float64),
        uses=[*at((1, 3, 21), (2, 3, 19), (1, 3, 34), (3, 3, 12)), _delayed],
        shrinks=True,
    ),
    Trap(
        name="pads tokens to whole blocks",
        source="Longformer and BigBird _pad_to_block_size (transformers)",
        make=_Pooled,
        example=lambda model: torch.zeros(2, 8, 3, dtype=torch.float64),
        uses=_TOKENS,
        shrinks="repaired",
    ),
]


def _as_at_this_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known.Constants, "_steady", lambda self, node, constants: constants(node, self))


ABLATIONS = [
    Ablation(
        mechanism="asks what is constant again with other amounts",
        disable=_as_at_this_size,
        trap="pads to full windows, head of single elements",
    ),
]
