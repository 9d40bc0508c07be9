"""Traps: several index tensors in one call, next to each other, around a slice, read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.ops import indexing
from engine.ops.indexing import Place
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

Step = Callable[[Tensor, Tensor], Tensor]


class _Between(nn.Module):
    """Two layers over tokens and a head; ``step(x, y)`` stands before the head and indexes the channels' tokens."""

    def __init__(self, step: Step, inner: int = 8) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(inner, 3)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.step(x, self.body(self.stem(x).relu())))
        return output


def _tokens(model: nn.Module) -> Tensor:
    return torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


_USES: Sequence[Use] = (once(2, 7, 5), once(3, 7, 5, seed=2), once(1, 7, 5, seed=3), once(2, 9, 5, seed=4))


def _trap(name: str, source: str, step: Step, **more: Any) -> Trap:
    options: dict[str, Any] = {"shrinks": True, **more}
    return Trap(name, source, lambda: _Between(step), _tokens, _USES, **options)


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


def _last(x: Tensor) -> Tensor:
    """Return a place in each sample that the data decides, as that of the end of a text."""
    return x.sum(-1).argmax(-1)


def _at_the_end(x: Tensor, y: Tensor) -> Tensor:
    return y[_rows(x), _last(x)]


def _around_channels(x: Tensor, y: Tensor) -> Tensor:
    """Return (samples, channels): the indices stand around the channels, so their dimension comes first."""
    return y.transpose(1, 2)[_rows(x), :, _last(x)]


def _several_around_channels(x: Tensor, y: Tensor) -> Tensor:
    """Return (samples, 3, channels): three places of each sample, before the channels and not behind them."""
    places = x.sum(-1).topk(3, -1).indices
    return y.transpose(1, 2)[_rows(x)[:, None], :, places]


def _as_many_places_as_channels(x: Tensor, y: Tensor) -> Tensor:
    """Return (samples, channels, channels): only their order tells places from channels."""
    places = torch.arange(8, device=x.device) % y.shape[1]
    return y.transpose(1, 2)[_rows(x)[:, None], :, places].relu()


def _behind_the_channels(x: Tensor, y: Tensor) -> Tensor:
    """Return (samples, channels): the indices come first although the channels stood before both of them."""
    pairs = torch.stack([y, -y], -1).transpose(1, 2)
    both = torch.stack([pairs, pairs * 2], -1)  # (samples, channels, tokens, 2, 2)
    places = torch.arange(8, device=x.device)
    return both[:, :, places % y.shape[1], :, places % 2].relu().mean((0, 3))


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    """Return (n, channels): what a matcher pairs, sample by sample."""
    samples, places = torch.cat([_rows(x), _rows(x)]), torch.cat([_last(x), _last(-x)])
    return y[samples, places].tanh()


def _written(x: Tensor, y: Tensor) -> Tensor:
    output = torch.zeros_like(y)
    output[_rows(x), _last(x)] = y.mean(1)
    return output + y


def _written_around_channels(x: Tensor, y: Tensor) -> Tensor:
    output = y.transpose(1, 2).clone()
    output[_rows(x), :, _last(x)] = y.sigmoid().mean(1)
    return output.transpose(1, 2)


def _mask_and_place(x: Tensor, y: Tensor) -> Tensor:
    return y + y[(x.sum((1, 2)) > -1e9), 0].mean(0)


def _mask_around_channels(x: Tensor, y: Tensor) -> Tensor:
    """Return what a flag for each sample and a place select together; torch makes places of the flags."""
    flags = x.sum((1, 2)) > -1e9
    return y + y.transpose(1, 2)[flags, :, _last(x)][:, None]


def _channel_by_index(x: Tensor, y: Tensor) -> Tensor:
    """Return a channel of each sample that the data names: all channels stay."""
    return y * y[_rows(x), :, _last(x) % y.shape[2]][..., None]


_CLIP = "https://github.com/openai/CLIP/blob/main/clip/model.py (encode_text)"
_NUMPY = "https://numpy.org/doc/stable/user/basics.indexing.html#combining-advanced-and-basic-indexing"
_DETR = "https://github.com/facebookresearch/detr/blob/main/models/detr.py (SetCriterion, src_idx)"

TRAPS = [
    _trap("features at the end of each text", _CLIP, _at_the_end),
    _trap("two indices around the channels", _NUMPY, _around_channels),
    _trap("several places around the channels", _NUMPY, _several_around_channels),
    _trap("as many places as channels around them", _NUMPY, _as_many_places_as_channels),
    _trap("two indices behind the channels, around a dimension", _NUMPY, _behind_the_channels),
    _trap("pairs that a matcher made", _DETR, _pairs),
    _trap("written at the end of each text", _CLIP, _written),
    _trap("written around the channels", _NUMPY, _written_around_channels),
    _trap("a flag and a number", _NUMPY, _mask_and_place, shrinks=False),
    _trap("a flag and places around the channels", _NUMPY, _mask_around_channels, shrinks=False),
    _trap("a channel that the data names", _NUMPY, _channel_by_index, shrinks=False),
]


def _as_if_adjacent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the dimensions of the indices where the first of them stands, as for indices next to each other."""
    whole = indexing.place_of

    def place_of(node: Any) -> Place | None:
        place = whole(node)
        return None if place is None else dataclasses.replace(place, start=place.dims[0])

    monkeypatch.setattr(indexing, "place_of", place_of)


ABLATIONS = [
    Ablation(
        "index tensors around a slice come first",
        _as_if_adjacent,
        "two indices behind the channels, around a dimension",
    ),
]
