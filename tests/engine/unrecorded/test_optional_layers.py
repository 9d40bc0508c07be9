"""Layers that run in some rounds only: they read what any layer before them has computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.unrecorded import unreached
from tests.engine.exactness import channel_masks, masked, randomised, relative_error, run


class Block(nn.Module):
    """A residual block whose norm comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, h: Tensor) -> Tensor:
        """(N, T, 8) -> (N, T, 8)."""
        return h + self.two(self.one(self.norm(h)).relu())  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """A layer that computes each channel from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        """(N, T, 8) -> (N, T, 8)."""
        return self.one(h).tanh()


class Dropping(nn.Module):
    """A stack that leaves layers out at random while it trains, as transformers' BART and wav2vec 2.0 do.

    Sources: https://arxiv.org/abs/1909.11556, `transformers`: `BartEncoder`.
    """

    def __init__(self, layer: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.layers, self.layerdrop = nn.Linear(3, 8), nn.ModuleList(layer() for _ in range(3)), 0.0
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 3) -> (N, T, 2)."""
        h = self.embed(x)
        for layer in self.layers:
            dropped = False
            if self.training and self.layerdrop > 0:
                dropped = bool(torch.rand([]) < self.layerdrop)
            if not dropped:
                h = layer(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


class Continuing(Dropping):
    """The same by ``continue``, with results that may come as tuples."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 3) -> (N, T, 2)."""
        h = self.embed(x)
        for layer in self.layers:
            if self.training and self.layerdrop > 0:
                if torch.rand([]) < self.layerdrop:
                    continue
            outputs = layer(h)
            h = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.head(self.norm(h))  # type: ignore[no-any-return]


class FromPositions(Dropping):
    """Where all layers are left out, a parameter goes on that no op reads otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 3) -> (N, T, 2)."""
        h, y = self.embed(x), self.positions
        for layer in self.layers:
            dropped = self.training and bool(torch.rand([]) < self.layerdrop)
            if not dropped:
                y = layer(h)
        return self.head(y)  # type: ignore[no-any-return]


def _compacted(net: nn.Module, x: Tensor) -> tuple[nn.Module, Any]:
    masks = channel_masks(net, seed=1)
    masks = {name: own for name, own in masks.items() if name != "head"}
    half = (torch.arange(8) % 2 == 0).to(x.dtype)
    for name, layer in net.named_modules():  # one and the same half of the residual stream, everywhere
        if isinstance(layer, nn.LayerNorm):
            masks[name] = {"weight": half, "bias": half}
        elif isinstance(layer, nn.Linear) and layer.out_features == 8:
            masks[name] = {"weight": half[:, None].expand_as(layer.weight), "bias": half}
    repaired = engine.fix_mask_conflict(masks, net, x)
    return masked(net, repaired), engine.ModelSpeedup(net, x, repaired).speedup_model()


def _check_with_dropped_layers(reference: Any, small: Any, x: Tensor) -> None:
    """Compare two networks in train mode, where each leaves the same layers out: all, none and some of them."""
    for model in (reference, small):
        model.train()
        model.layerdrop = 0.6
    for seed in range(12):
        torch.manual_seed(seed)
        expected = run(reference, x)
        torch.manual_seed(seed)
        assert relative_error(expected, run(small, x)) <= 1e-9


@pytest.mark.parametrize("kind", [Dropping, Continuing])
def test_layers_of_a_residual_stream_shrink(kind: type[Dropping]) -> None:
    """And compute the same whichever of them are left out."""
    x, net = torch.randn(2, 5, 3, dtype=torch.float64), randomised(kind())
    reference, small = _compacted(net, x)
    assert small.embed.out_features == 4 and small.layers[1].two.out_features == 4
    _check_with_dropped_layers(reference, small, x)


def test_without_the_rule_the_stream_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that ran in some rounds may read anything."""
    monkeypatch.setattr(unreached, "values_around_optional_layers", lambda *args: [])
    x, net = torch.randn(2, 5, 3, dtype=torch.float64), randomised(Dropping())
    assert _compacted(net, x)[1].embed.out_features == 8


@pytest.mark.parametrize("net", [Dropping(Mixer), FromPositions()], ids=lambda net: type(net.layers[0]).__name__)
def test_what_has_other_channels_stays_exact(net: nn.Module) -> None:
    """Layers that compute each channel from all others, and a parameter that goes on where no layer runs."""
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    _check_with_dropped_layers(*_compacted(randomised(net), x), x)
