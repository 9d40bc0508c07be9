"""RMS norms that lost channels, as ordinary norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.verification.rescaled import Rescaled, rescaled_norms

EPS = (1e-12, 1e-8, 1e-5, 1e-2)


class Composed(nn.Module):
    """An RMS norm as language models write it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square, computed in float32."""
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Shifted(Composed):
    """The same with ``1 + w``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


def narrowed(norm: nn.Module, size: int, kept: int, bias: float = 0.0) -> nn.Module:
    """A network around a norm of which some channels are left; the others are zero, or a constant in the norm."""
    model = nn.Sequential(nn.Linear(3, size), norm, nn.Linear(size, 2)).double()
    keep = torch.randperm(size, generator=torch.Generator().manual_seed(0)) < kept
    if bias:
        model[0].bias.data.fill_(bias)
    masks = {"0": {"weight": keep[:, None].expand(size, 3), "bias": keep if not bias else torch.ones_like(keep)}}
    masks |= {"1": {name: keep for name, _ in norm.named_parameters()}}
    return engine.ModelSpeedup(model, torch.randn(4, 3).double(), masks).speedup_model()


def plain(norm: nn.Module, rescaled: Rescaled) -> tuple[Tensor, Tensor]:
    """What the formula gives for the norm's input, by the new weight and the new eps."""
    ((_, eps),) = rescaled.numbers.items()
    x = torch.randn(5, rescaled.kept, generator=torch.Generator().manual_seed(1)).double() * math.sqrt(eps)
    (weight,) = rescaled.tensors.values()
    factor = 1 + weight if isinstance(norm, Shifted) else weight
    return x, factor * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize(("size", "kept"), [(64, 1), (64, 16), (64, 63), (6, 5)])
def test_an_rms_norm_becomes_an_ordinary_one(size: int, kept: int, eps: float) -> None:
    """``eps' = eps D / d`` and ``w' = w sqrt(D / d)``, to 1e-12, for torch's norm and for one with ``1 + w``."""
    for norm in (nn.RMSNorm(size, eps=eps), Shifted(size, eps)):
        small = narrowed(norm, size, kept)
        rescaled = rescaled_norms(small)["1"]
        assert (rescaled.is_plain, rescaled.size, rescaled.kept) == (True, size, kept)
        assert list(rescaled.numbers.values()) == [pytest.approx(eps * size / kept, rel=1e-14)]
        x, expected = plain(norm, rescaled)
        assert torch.allclose(small[1](x), expected, rtol=1e-12, atol=0)


def test_a_norm_that_computes_in_float32_is_compared_in_float64() -> None:
    """Its own rounding is not a difference."""
    small = narrowed(Composed(8, 1e-6), 8, 2)
    rescaled = rescaled_norms(small)["1"]
    assert rescaled.is_plain and rescaled.numbers == {"variance_epsilon": pytest.approx(4e-6)}


def test_an_rms_norm_without_eps_gets_one() -> None:
    """What torch takes of the dtype becomes a number."""
    rescaled = rescaled_norms(narrowed(nn.RMSNorm(8), 8, 2))["1"]
    assert rescaled.numbers == {"eps": pytest.approx(4 * torch.finfo(torch.float64).eps)}


def test_constants_go_into_eps() -> None:
    """Removed channels that were constant add their squares."""
    small = narrowed(nn.RMSNorm(8, eps=1e-3), 8, 2, bias=0.5)
    rescaled = rescaled_norms(small)["1"]
    assert rescaled.is_plain and rescaled.numbers["eps"] == pytest.approx((1e-3 + 6 * 0.25 / 8) * 4)
    x, expected = plain(small[1], rescaled)
    assert torch.allclose(small[1](x), expected, rtol=1e-12, atol=0)


def test_layer_norms_are_not_plain() -> None:
    """The variance of what is left says nothing about the mean over all."""
    rescaled = rescaled_norms(narrowed(nn.LayerNorm(8), 8, 2))["1"]
    assert (rescaled.is_plain, rescaled.kind, rescaled.size, rescaled.kept) == (False, "LayerNorm", 8, 2)


def test_the_model_stays_as_it_is() -> None:
    """Nothing is changed; a model with whole norms has none."""
    small = narrowed(nn.RMSNorm(8, eps=1e-3), 8, 2)
    before = small[1].weight.clone()
    rescaled_norms(small)
    assert torch.equal(before, small[1].weight) and small[1].eps == 1e-3
    assert rescaled_norms(nn.Sequential(nn.RMSNorm(4))) == {}
