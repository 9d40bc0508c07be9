"""Traps: numbers that are not finite, that a dtype cannot hold, and zeros that are no plain zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import speedup
from engine.analysis.constants import Constants
from engine.ops import pointwise
from engine.verification import comparison
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]

CHANNELS = 8
INF, NAN = math.inf, math.nan


class _Net(nn.Module):
    """A convolution, what stands between, and a convolution that reads it."""

    def __init__(self, between: nn.Module, kernel: int = 1) -> None:
        super().__init__()
        self.body, self.between, self.head = nn.Conv2d(3, CHANNELS, 3), between, nn.Conv2d(CHANNELS, 4, kernel)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.body(x)))
        return out


class _Guarded(_Net):
    """Replaces what is no number in its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num(1.0)


class _Map(nn.Module):
    """A function of activations and of a stored vector with one entry per channel."""

    def __init__(self, function: Callable[..., Tensor], *entries: float, parameter: bool = False) -> None:
        super().__init__()
        self.function = function
        vector = torch.tensor([*entries, *[1.0] * (CHANNELS - len(entries))]).view(1, -1, 1, 1)
        self.vector: Tensor
        if parameter:
            self.vector = nn.Parameter(vector)
        else:
            self.register_buffer("vector", vector)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x, self.vector)
        return out


class _FrozenNorm(nn.Module):
    """A batch norm of given statistics, scaled and shifted."""

    def __init__(self, variance: float, mean: float = 0.0, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.shift = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.ones(CHANNELS))
        self.register_buffer("variance", torch.tensor([variance] + [1.0] * (CHANNELS - 1)))
        self.register_buffer("mean", torch.tensor([mean] + [0.0] * (CHANNELS - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.shift, eps=self.eps)


def _weight(net: nn.Module, name: str, index: Any, number: float) -> nn.Module:
    with torch.no_grad():
        net.get_parameter(name)[index] = number
    return net


def _even(model: nn.Module, seed: int) -> Masks:
    """Every other channel of the body is masked, its bias too; the first is."""
    kept = (torch.arange(CHANNELS) + seed) % 2
    return {
        "body": {
            "weight": kept.view(-1, 1, 1, 1).expand(model.get_parameter("body.weight").shape),
            "bias": kept.clone(),
        }
    }


def _trap(name: str, source: str, make: Callable[[], nn.Module], **outcome: Any) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(2, 3, 6, 6, dtype=torch.float64),
        uses=[once(1, 3, 9, 7), once(3, 3, 6, 6, seed=2)],
        masks=_even,
        seeds=(0,),
        **outcome,
    )


TRAPS = [
    _trap(
        "a gate that is infinite where the channel is masked",
        "temperature scaling by a stored 1 / t, as in learnable-temperature heads whose t reaches 0",
        lambda: _Net(_Map(lambda x, g: (x * g).nan_to_num(7.0, 3.0, -3.0), INF)),
    ),
    _trap(
        "a learned gate that is infinite",
        "LayerScale and ReZero parameters after a diverged run, guarded by nan_to_num",
        lambda: _Net(_Map(lambda x, g: (x * g).nan_to_num(7.0, 3.0, -3.0), INF, parameter=True)),
    ),
    _trap(
        "a gate that is no number",
        "torch.nan_to_num behind a precomputed ratio of counts (0 / 0 for classes without samples)",
        lambda: _Net(_Map(lambda x, g: (x * g).nan_to_num(7.0), NAN)),
    ),
    _trap(
        "a factor of infinity in the code",
        "torch.full_like(x, -inf) and scores * -inf, as hard attention masks are written",
        lambda: _Net(_Map(lambda x, g: (x.relu() * INF).nan_to_num(2.0, 5.0))),
    ),
    _trap(
        "a division by a stored zero",
        "division by a stored standard deviation (normalisation of inputs inside the model)",
        lambda: _Net(_Map(lambda x, s: (x / s).nan_to_num(2.0, 3.0, 3.0), 0.0)),
    ),
    _trap(
        "zero times its reciprocal",
        "x * x.reciprocal(), as straight-through normalisations write one",
        lambda: _Net(_Map(lambda x, g: (x * x.reciprocal()).nan_to_num(5.0))),
    ),
    _trap(
        "a mask of minus infinity that is added",
        "causal masks kept in buffers (nanoGPT's bias, torch.nn.Transformer.generate_square_subsequent_mask)",
        lambda: _Net(_Map(lambda x, m: (x + m).softmax(-1).nan_to_num(0.0), -INF)),
    ),
    _trap(
        "the logarithm of a masked channel",
        "log-spectrograms: log of a magnitude, clamped from below (librosa's power_to_db)",
        lambda: _Net(_Map(lambda x, g: x.abs().log().clamp(min=-3.0))),
    ),
    _trap(
        "an inverse root of a masked channel",
        "rsqrt of an energy, clamped from above",
        lambda: _Net(_Map(lambda x, g: x.abs().rsqrt().clamp(max=3.0))),
    ),
    _trap(
        "the side of zero",
        "torch.copysign as in sign-preserving powers",
        lambda: _Net(_Map(lambda x, g: torch.copysign(torch.ones_like(x), -x))),
    ),
    _trap(
        "an angle at zero",
        "torch.atan2 of two maps: phase of a complex spectrum (torchaudio, vocoders)",
        lambda: _Net(_Map(lambda x, g: torch.atan2(-x, -torch.ones_like(x)))),
    ),
    _trap(
        "a clamp at no number",
        "torch.clamp with bounds from statistics that are NaN before calibration",
        lambda: _Net(_Map(lambda x, g: x.clamp(min=NAN).nan_to_num(1.5))),
    ),
    _trap(
        "a padding of minus infinity",
        "max pooling over F.pad(..., value=-inf), as TF-same pooling is written in timm",
        lambda: _Net(_Map(lambda x, g: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-INF), 2))),
    ),
    _trap(
        "a weight of infinity under the mask",
        "checkpoints of diverged runs; 0 * inf is NaN in parameter * mask",
        lambda: _weight(_Net(_Map(lambda x, g: x.nan_to_num(1.0))), "body.weight", 0, INF),
        refused=r"'body\.weight' holds inf at \(0, 0, 0, 0\)",
    ),
    _trap(
        "a column of infinity behind a masked channel",
        "checkpoints of diverged runs; the masked network computes 0 * inf",
        lambda: _weight(_Guarded(nn.ReLU()), "head.weight", (slice(None), 0), NAN),
        refused=r"'head\.weight' holds nan",
    ),
    _trap(
        "a norm of a variance of zero and no eps",
        "FrozenBatchNorm2d of torchvision with eps=0, which its first release had",
        lambda: _Net(nn.Sequential(_FrozenNorm(0.0), _Map(lambda x, g: x.nan_to_num(2.0, 3.0, 3.0)))),
        refused="batch_norm.*not finite|not finite on random inputs",
    ),
    _trap(
        "a norm of a negative variance",
        "statistics averaged in half precision (weight averaging of checkpoints) drift below zero",
        lambda: _Net(nn.Sequential(_FrozenNorm(-1.0, eps=1e-5), _Map(lambda x, g: x.nan_to_num(2.0)))),
        refused="batch_norm.*not finite|not finite on random inputs",
    ),
    _trap(
        "a norm of an infinite mean",
        "running statistics that overflowed in float16",
        lambda: _Net(nn.Sequential(_FrozenNorm(1.0, INF), _Map(lambda x, g: x.nan_to_num(2.0)))),
        refused="'between.0.mean' holds inf",
    ),
    _trap(
        "a norm of a huge eps",
        "torch.nn.GroupNorm(eps=...) beyond the scale of its input",
        lambda: _Net(_Map(lambda x, g: F.layer_norm(x.movedim(1, -1), (CHANNELS,), eps=1e30).movedim(-1, 1) * 1e12)),
    ),
    _trap(
        "a constant that float16 cannot hold",
        "x.half() + offset inside a network of wider weights: hand-written mixed precision",
        lambda: _Net(_Map(lambda x, g: (x.half() + 2048.7).double() - 2048)),
    ),
    _trap(
        "a constant that bfloat16 rounds",
        "x.bfloat16() inside a network of wider weights",
        lambda: _Net(_Map(lambda x, g: (x.bfloat16() + 257).double() - 256)),
    ),
    _trap(
        "a constant that float32 rounds",
        "x.float() inside a double-precision network (norms of transformers)",
        lambda: _Net(_Map(lambda x, g: (x.float() + 16777217).double() - 16777216)),
    ),
    _trap(
        "a constant beyond float16",
        "the overflow of float16 at 65 504, clamped behind",
        lambda: _Net(_Map(lambda x, g: ((x.half() + 60000) * 2).double().clamp(max=3.0))),
    ),
    _trap(
        "a constant that half precision holds exactly",
        "x.half() + 1, nothing is rounded",
        lambda: _Net(_Map(lambda x, g: (x.half() * 0 + 1.5).double() + x)),
        shrinks=True,
    ),
    _trap(
        "an integer that wraps around",
        "quantisation by hand: to(torch.int8) with a zero point",
        lambda: _Net(_Map(lambda x, g: (x.clamp(-1, 1).to(torch.int8) + 127 + 2).double())),
    ),
    _trap(
        "an unsigned integer below zero",
        "images as uint8, from which one is subtracted",
        lambda: _Net(_Map(lambda x, g: (x.abs().to(torch.uint8) - 1).double())),
    ),
    _trap(
        "a number that becomes a truth value",
        "x.bool() as an activity gate",
        lambda: _Net(_Map(lambda x, g: (x + 2).clamp(min=2).bool().double() * 3)),
    ),
    _trap(
        "a shift of denormal numbers",
        "biases that weight decay drove below the smallest normal number",
        lambda: _Net(_Map(lambda x, g: x + g * 1e-320)),
    ),
    _trap(
        "complex numbers",
        "torch.view_as_complex, as rotary embeddings and spectral layers (FNO) are written",
        lambda: _Net(_Map(lambda x, g: torch.view_as_real(torch.complex(x, x + 1) * (1 + 2j)).sum(-1))),
    ),
]


def _no_taint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Constants, "finite", lambda self, value: True)
    patch.setattr(comparison, "_relative", lambda difference, scale: 0.0)
    patch.setattr(comparison, "_inner_error", lambda *given: (0.0, 0))


def _no_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(speedup, "check_finite", lambda *given: None)


def _any_sign(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pointwise, "SIGNED", [])


def _any_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Constants, "_held", lambda self, array, value: self._cleaned(array))


ABLATIONS = [
    Ablation(
        "zero times what is stored as infinite is no zero",
        _no_taint,
        "a gate that is infinite where the channel is masked",
    ),
    Ablation("what depends on the sign of zero is not constant", _any_sign, "the side of zero"),
    Ablation("a constant is what its dtype can hold", _any_dtype, "a constant that bfloat16 rounds"),
    Ablation(
        "a weight that is not finite is refused",
        _no_check,
        "a weight of infinity under the mask",
    ),
    Ablation("a constant is what its integer dtype can hold", _any_dtype, "an integer that wraps around"),
]
