"""Traps: slices, writes, empty parts, factors and decisions that follow the size of the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import join
from engine.recording import resized_runs
from engine.running import provenance
from tests.engine.traps.padding import at, trap
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


def _pointwise() -> nn.Module:
    return nn.Conv2d(8, 4, 1)


# ---------------------------------------------------------------- writes and slices


def _canvas(x: Tensor) -> Tensor:
    """A picture in the corner of a canvas that is a whole number of strides."""
    height, width = x.shape[-2:]
    canvas = x.new_zeros(x.shape[0], x.shape[1], -(-height // 4) * 4, -(-width // 4) * 4)
    canvas[:, :, :height, :width] = x
    return canvas


def _canvas_copied(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    canvas = x.new_full((*x.shape[:2], (height + 3) // 4 * 4, (width + 3) // 4 * 4), 0.5)
    canvas[..., :height, :width].copy_(x)
    return canvas


def _back_to_size(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    doubled = F.interpolate(x, size=(-(-height // 4) * 4, -(-width // 4) * 4))
    return F.pad(doubled[:, :, :height, :width], (0, 1, 0, 1))


def _empty_tail(x: Tensor) -> Tensor:
    """What is left of a whole number of blocks, put behind the blocks again with another sign."""
    whole = x.shape[-1] // 4 * 4
    return torch.cat([x[..., :whole], -x[..., whole:]], -1)


def _empty_rest_added(x: Tensor) -> Tensor:
    whole = x.shape[-2] // 4 * 4
    return torch.cat([x, x[:, :, whole:].sigmoid()], 2)


def _rest_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., x.shape[-1] // 4 * 4 :] += 1.0
    return x


def _split_rest(x: Tensor) -> Tensor:
    whole = x.shape[-1] // 4 * 4
    front, rest = x.split([whole, x.shape[-1] - whole], -1)
    return torch.cat([front, rest * 2 + 1], -1)


def _halves(x: Tensor) -> Tensor:
    """Two halves, and what is between them where the size is odd."""
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], x[..., half : x.shape[-1] - half] + 1, x[..., -half:]], -1)


# ---------------------------------------------------------------- numbers


def _by_area(x: Tensor) -> Tensor:
    return x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3]) + x


def _by_length(x: Tensor) -> Tensor:
    return x * (x.shape[-1] ** -0.5)


def _by_tensor(x: Tensor) -> Tensor:
    return x / torch.tensor(x.shape[-1], dtype=x.dtype)


def _by_counted(x: Tensor) -> Tensor:
    return x / x.new_tensor([float(x.shape[-2] * x.shape[-1])])


def _filled(x: Tensor) -> Tensor:
    return x * torch.full((1, 1, 1, 1), 1 / x.shape[-1], dtype=x.dtype)


def _shifted_by_parity(x: Tensor) -> Tensor:
    return x + (0.5 if x.shape[-1] % 2 else 0.0)


def _rounded_factor(x: Tensor) -> Tensor:
    return x * round(x.shape[-1] / 8)


def _ramp(x: Tensor) -> Tensor:
    ramp = torch.arange(int(x.shape[-1]), dtype=x.dtype) // 8
    return x + ramp


# ---------------------------------------------------------------- decisions


def _large_are_pooled(x: Tensor) -> Tensor:
    if x.shape[-1] > 9:
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1)
    return x


def _small_are_filled(x: Tensor) -> Tensor:
    if x.shape[-1] < 8:
        x = F.pad(x, (0, 8 - x.shape[-1]))
    return x


def _one_sample(x: Tensor) -> Tensor:
    return x * 0.5 + 1 if x.shape[0] == 1 else x


def _while_too_large(x: Tensor) -> Tensor:
    while x.shape[-1] > 8:
        x = F.avg_pool2d(x, 2, ceil_mode=True) + 0.25
    return x


def _wider_than_high(x: Tensor) -> Tensor:
    return x + 1 if x.shape[-1] > x.shape[-2] else x


def _more_channels_than_columns(x: Tensor) -> Tensor:
    """The order of two products, whichever is less work; the result differs by a constant here."""
    return x if x.shape[1] > x.shape[-1] // 4 else x.sigmoid()


def _more_entries_than(x: Tensor) -> Tensor:
    return x.tanh() if x.shape[1] * x.shape[2] > 40 else x


class _LoneSample(nn.Module):
    """Statistics of one sample are none, so the norm is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if x.size(0) > 1:
            x = self.norm(x)
        return self.head(x.relu())  # type: ignore[no-any-return]


class _ShortSentence(nn.Module):
    """Sentences shorter than the largest kernel are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(18, 3)
        self.kernels = nn.ModuleList(nn.Conv1d(8, 6, k) for k in (2, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        if x.size(2) < 5:
            x = F.pad(x, (0, 5 - x.size(2)))
        return self.head(torch.cat([kernel(x).relu().amax(2) for kernel in self.kernels], 1))  # type: ignore[no-any-return]


class _SmallMap(nn.Module):
    """Dilations that are larger than the map are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.dilated = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=d, dilation=d) for d in (1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.stem(x)
        for dilation, layer in zip((1, 2, 4), self.dilated, strict=True):
            if min(x.shape[-2:]) > dilation:
                y = y + layer(x).relu()
        return self.head(y)  # type: ignore[no-any-return]


class _Shifted(nn.Module):
    """Windows that are shifted by half, unless one covers the whole input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, -width % 8, 0, -height % 8))
        shift = 0 if x.shape[1] <= 8 else 4
        if shift:
            x = torch.roll(x, (-shift, -shift), (1, 2))
        x = x + self.mix(x).relu()
        if shift:
            x = torch.roll(x, (shift, shift), (1, 2))
        return self.head(x[:, :height, :width].permute(0, 3, 1, 2))


class _Positions(nn.Module):
    """A table of positions, cut to length, of which the first ones add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 8)
        table = torch.zeros(16, 8)
        table[8:] = 0.7
        self.register_buffer("table", table)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.get_buffer("table")[: x.shape[1]])


class _Resized(nn.Module):
    """A table of positions that is resized where the picture is of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.table = nn.Parameter(torch.randn(1, 8, 2, 2) * 0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        table = self.table
        if table.shape[-2:] != x.shape[-2:]:
            table = F.interpolate(table, size=x.shape[-2:], mode="bicubic")
        return self.head((x + table).flatten(2).transpose(1, 2))


class _Tokens(nn.Module):
    """Token numbers, and the last few of them."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)
        self.f = f

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.f(self.inner(self.table(tokens))))


def _last_eight(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-8] + 1, x[:, -8:]], 1)


def _beyond_eight(x: Tensor) -> Tensor:
    return torch.cat([x[:, :8], x[:, 8:] * 0.5 + 1], 1)


def _even_tokens(x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        x = F.pad(x, (0, 0, 0, 1))
    return x.view(x.shape[0], x.shape[1] // 2, 2, x.shape[2]).sum(2) / 2


def _ids(*shapes: tuple[int, int]) -> list[Use]:
    def use(shape: tuple[int, int]) -> Use:
        def run(model: nn.Module) -> Any:
            with torch.no_grad():
                return model.eval()(torch.arange(math.prod(shape)).view(shape) % 11)

        return run

    return [use(shape) for shape in shapes]


def _of_tokens(name: str, source: str, f: Callable[[Tensor], Tensor], shrinks: bool | str = True) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=lambda: _Tokens(f),
        example=lambda model: torch.zeros(2, 8, dtype=torch.long),
        uses=_ids((1, 8), (2, 9), (3, 17), (1, 5)),
        shrinks=shrinks,
    )


def _pooled(name: str, pool: Callable[[Tensor], Tensor], **more: Any) -> Trap:
    return trap(name, "torch.nn.functional, as pooling of classifiers and of feature pyramids", pool, **more)


_SEQUENCES: Sequence[Use] = at((1, 8, 3), (2, 5, 3), (3, 13, 3))

TRAPS = [
    Trap(
        name="a lone sample skips the norm",
        source="VainF/DeepLabV3Plus-Pytorch, ASPPPooling",
        make=_LoneSample,
        example=lambda model: torch.zeros(4, 3, 6, 6, dtype=torch.float64),
        uses=at((1, 3, 6, 6), (1, 3, 9, 7), (3, 3, 6, 6)),
    ),
    Trap(
        name="a short sentence is padded",
        source="TextCNN (Kim, 2014) in public code: sentences are padded to the largest kernel",
        make=_ShortSentence,
        example=lambda model: torch.zeros(2, 8, 6, dtype=torch.float64),
        uses=at((1, 3, 6), (2, 2, 6), (2, 11, 6)),
    ),
    Trap(
        name="a small map skips a dilation",
        source="segmentation heads that leave out dilations larger than the map",
        make=_SmallMap,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=at((1, 3, 2, 2), (2, 3, 3, 9), (2, 3, 17, 17)),
    ),
    trap(
        "writes into a canvas",
        "torchvision GeneralizedRCNNTransform.batch_images; DETR NestedTensor",
        _canvas,
        shrinks="repaired",
    ),
    trap(
        "copies into a canvas of a number",
        "detectron2 ImageList.from_tensors with pad_value",
        _canvas_copied,
        shrinks=False,
    ),
    trap("cuts back to the size of the input", "SwinIR forward: x[:, :, :H, :W]", _back_to_size),
    trap(
        "an empty tail",
        "block-wise audio models, the last incomplete block",
        _empty_tail,
        head=_pointwise,
        shrinks="repaired",
    ),
    trap("an empty tail through a function", "block-wise models", _empty_rest_added, head=_pointwise, shrinks=False),
    trap(
        "an empty tail written in place", "masks of incomplete blocks", _rest_in_place, head=_pointwise, shrinks=False
    ),
    trap("a split into whole blocks and a rest", "Longformer chunking", _split_rest, head=_pointwise, shrinks=False),
    trap("two halves and what is between", "wavelet and butterfly networks", _halves, head=_pointwise, shrinks=False),
    trap(
        "a mean by hand", "SE blocks that divide by height times width", _by_area, head=_pointwise, shrinks="repaired"
    ),
    trap(
        "a factor of the length",
        "linear attention, divided by the root of the length",
        _by_length,
        head=_pointwise,
        shrinks="repaired",
    ),
    trap("a tensor of the length", "x / torch.tensor(n)", _by_tensor, head=_pointwise, shrinks=False),
    trap(
        "a new tensor of the area",
        "losses normalised by torch.tensor(h * w)",
        _by_counted,
        head=_pointwise,
        shrinks=False,
    ),
    trap("a tensor filled with one over the length", "uniform weights", _filled, head=_pointwise, shrinks=False),
    trap(
        "a term for odd sizes",
        "parity corrections of pixel centres",
        _shifted_by_parity,
        head=_pointwise,
        shrinks=False,
    ),
    trap("a rounded factor", "scale factors of positions", _rounded_factor, head=_pointwise, shrinks=False),
    trap("a ramp of steps", "coordinates as torch.arange(int(w))", _ramp, head=_pointwise, shrinks=False),
    trap(
        "large pictures are pooled",
        "early downsampling of large inputs",
        _large_are_pooled,
        head=_pointwise,
        shrinks="repaired",
    ),
    trap("small pictures are filled up", "minimum size of a backbone", _small_are_filled, head=_pointwise),
    trap(
        "one sample goes another way",
        "if x.shape[0] == 1, as in batch-norm work-arounds",
        _one_sample,
        head=_pointwise,
        shrinks=False,
    ),
    trap("pools until it is small", "blur pyramids", _while_too_large, head=_pointwise, shrinks=False),
    trap("wider than high", "portrait and landscape handling", _wider_than_high, head=_pointwise, shrinks=False),
    trap(
        "more channels than columns",
        "attention that chooses the cheaper order (efficient attention, XCiT)",
        _more_channels_than_columns,
        head=_pointwise,
        shrinks=False,
    ),
    trap(
        "more entries than a limit",
        "chunked evaluation above a limit",
        _more_entries_than,
        head=_pointwise,
        shrinks=False,
    ),
    Trap(
        name="a shift that is none where a window covers all",
        source="torchvision swin_transformer.py shifted_window_attention; Swin-Transformer BasicLayer",
        make=_Shifted,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=at((1, 3, 8, 8), (2, 3, 16, 16), (1, 3, 13, 9), (1, 3, 5, 7)),
        shrinks="repaired",
    ),
    Trap(
        name="a table of positions cut to length",
        source="GPT-style wpe[:T]; nanoGPT model.py",
        make=_Positions,
        example=lambda model: torch.zeros(2, 8, 3, dtype=torch.float64),
        uses=_SEQUENCES,
    ),
    Trap(
        name="a table of positions that is resized",
        source="DINO vision_transformer.py interpolate_pos_encoding",
        make=_Resized,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=at((1, 3, 8, 8), (2, 3, 12, 16), (1, 3, 20, 8)),
    ),
    _of_tokens("the last eight tokens", "sliding windows x[:, -n:]", _last_eight, shrinks=False),
    _of_tokens("the tokens beyond eight", "prefix and rest x[:, :n], x[:, n:]", _beyond_eight, shrinks=False),
    _of_tokens("tokens in pairs", "Funnel transformer, odd lengths padded", _even_tokens, shrinks=False),
    _pooled("a window that is cut off", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    _pooled("a window that counts no padding", lambda x: F.avg_pool2d(x, 3, 2, 1, True, count_include_pad=False)),
    _pooled("pools to the size it has", lambda x: F.adaptive_avg_pool2d(x, (8, 8))),
    _pooled("resizes to the size it has", lambda x: F.interpolate(x, size=(8, 8), mode="bilinear")),
    _pooled("cubic to the size it has", lambda x: F.interpolate(x, size=(8, 8), mode="bicubic"), head=_pointwise),
    _pooled(
        "unfolds and folds",
        lambda x: F.fold(F.unfold(x, 2, stride=2), (x.shape[2] // 2 * 2, x.shape[3] // 2 * 2), 2, stride=2),
        shrinks="repaired",
    ),
    _pooled("every second position", lambda x: x[:, :, ::2, 1::2]),
    _pooled("padded around", lambda x: F.pad(x, (1, 1, 1, 1), mode="circular")),
    _pooled("padded with its border", lambda x: F.pad(x, (0, x.shape[-1] % 3, 0, 0), mode="replicate")),
]


def _no_other_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resized_runs, "reads_sizes", lambda guards: False)


def _no_numbers_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(provenance.Provenance, "_note_unmatched", lambda self, numbers: None)


def _no_empty_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(join, "_may_have_some", lambda *args: False)


ABLATIONS = [
    Ablation("records other sizes where code decides by one", _no_other_sizes, "large pictures are pooled"),
    Ablation("notes numbers that torch took and no op was given", _no_numbers_left, "writes into a canvas"),
    Ablation(
        "an empty part may have entries at another size", _no_empty_parts, "an empty tail through a function", True
    ),
]
