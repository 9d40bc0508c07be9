"""Traps: kernels of torch's own that run under a user's conditions and not under those of a recording."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.surgery import exchange
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap

__all__ = ["ABLATIONS", "TRAPS"]

_SOURCE = "nn.TransformerEncoder with src_key_padding_mask, as in the tutorials of torch"


class Encoder(nn.Module):
    """A stock encoder between two layers.

    Args:
        depth: number of its layers.
        norm: whether a norm follows.
        options: for its layers.
    """

    def __init__(self, depth: int = 2, norm: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 16), nn.Linear(16, 2)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
        packs = not options.get("norm_first", False)  # torch warns that it packs no tokens then
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(16) if norm else None, packs)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return scores of tokens."""
        out: Tensor = self.head(self.encoder(self.embed(x), src_key_padding_mask=padding))
        return out


class LayerAlone(Encoder):
    """One encoder layer without an encoder around it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)  # type: ignore[assignment]


class Decoder(Encoder):
    """A stock decoder that attends to its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, batch_first=True), 2)  # type: ignore[assignment]

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return scores of tokens."""
        y = self.embed(x)
        out: Tensor = self.head(
            self.encoder(y, y, tgt_key_padding_mask=padding, memory_key_padding_mask=padding)  # type: ignore[call-arg]
        )
        return out


def tokens(model: nn.Module) -> Tensor:
    """Return an example without padding."""
    return torch.zeros(2, 5, 3, dtype=torch.float64)


def padded(model: nn.Module) -> dict[str, Tensor]:
    """Return an example with padding."""
    return {"x": tokens(model), "padding": torch.arange(5) >= torch.tensor([[5], [3]])}


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield name, module


def heads(model: nn.Module, seed: int, layers: Callable[[str], bool] = lambda name: True) -> Masks:
    """Mask two of four heads."""
    kept = torch.tensor([0.0, 1, 1, 0], dtype=torch.float64).repeat_interleave(4).repeat(3)
    return {
        name: {"in_proj_weight": kept[:, None].expand_as(module.in_proj_weight), "in_proj_bias": kept}
        for name, module in _attentions(model)
        if layers(name)
    }


def last_heads(model: nn.Module, seed: int) -> Masks:
    """Mask heads of the second layer alone."""
    return heads(model, seed, lambda name: "layers.1" in name or "layers" not in name)


def first_heads(model: nn.Module, seed: int) -> Masks:
    """Mask heads of the first layer alone."""
    return heads(model, seed, lambda name: "layers.0" in name or "layers" not in name)


def neurons(model: nn.Module, seed: int) -> Masks:
    """Mask neurons of the feed-forward parts."""
    kept = torch.tensor([0.0, 1, 1], dtype=torch.float64).repeat(8)
    return {
        name: {"weight": kept[:, None].expand(24, 16), "bias": kept}
        for name, module in model.named_modules()
        if name.endswith("linear1")
    }


def run(
    context: Callable[[], AbstractContextManager[Any]], left: bool | None = True, training: bool = False
) -> Callable[[nn.Module], Any]:
    """Return a use under a context.

    Args:
        context: makes it.
        left: whether tokens stand left of the padding; None: no padding.
        training: whether in train mode, where dropout has to be off.
    """

    def use(model: nn.Module) -> Any:
        x = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        padding = torch.arange(7) >= torch.tensor([[4], [7], [2]])
        padding = padding if left else padding.flip(1)
        with context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
            return model.train(training)(x, *([] if left is None else [padding])).detach().clone()

    return use


_USES = [
    run(context, left)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for left in (True, False, None)
]


def _trap(name: str, make: Callable[[], nn.Module], masks: Callable[[nn.Module, int], Masks] = heads) -> Iterator[Trap]:
    for example in (tokens, padded):
        yield Trap(f"{name}, {example.__name__}", _SOURCE, make, example, _USES, masks=masks, shrinks=True, seeds=(0,))


TRAPS = [
    *_trap("an encoder", Encoder),
    *_trap("an encoder that loses heads in its last layer", Encoder, last_heads),
    *_trap("an encoder that loses heads in its first layer", Encoder, first_heads),
    *_trap("an encoder that loses neurons", Encoder, neurons),
    *_trap("an encoder with a norm behind it", lambda: Encoder(norm=True)),
    *_trap("an encoder with norms in front", lambda: Encoder(norm_first=True)),
    *_trap("an encoder of one layer", lambda: Encoder(1)),
    *_trap("an encoder with GELU", lambda: Encoder(activation="gelu"), last_heads),
    *_trap("an encoder layer alone", LayerAlone),
    *_trap("an encoder layer alone that loses neurons", LayerAlone, neurons),
    *_trap("a decoder", Decoder),
    *_trap("a decoder that loses neurons", Decoder, neurons),
]


def _with_fused_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "unfused", lambda modules, exchanged: ())


ABLATIONS = [
    Ablation(
        "encoders run their layers as they are written",
        _with_fused_encoders,
        "an encoder that loses heads in its last layer, tokens",
    )
]
