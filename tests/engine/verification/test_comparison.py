"""Two observations held against each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import VerificationError


class Guarded(nn.Module):
    """Divides by zero inside, and hides it in the output."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Divide, and hide what came of it."""
        hidden = self.norm(self.first(x) * self.factor)
        return self.last(hidden.nan_to_num(0.5, 2.0, -2.0))


@pytest.mark.parametrize(("factor", "where"), [(math.inf, "batch_norm in 'norm'"), (math.nan, "batch_norm in 'norm'")])
def test_what_is_not_finite_inside_is_named(factor: float, where: str) -> None:
    """Infinities hold against nothing, not even themselves."""
    model = Guarded(factor).eval()
    kept = torch.tensor([0, 1, 1, 1])
    masks = {"last": {"weight": torch.ones(2, 4, 1)}, "first": {"weight": kept.view(4, 1, 1).expand(4, 2, 1)}}
    masks["norm"] = {"weight": kept, "bias": kept}
    masks["last"]["weight"][0] = 0
    masks["last"]["bias"] = torch.tensor([0, 1])
    masks["last"]["weight"][:, 1] = 0
    with pytest.raises(VerificationError, match=f"own {where}.*is not finite"):
        engine.ModelSpeedup(model, torch.randn(2, 2, 5), masks, confidence=2).speedup_model()


def test_the_output_is_named_that_is_not_finite() -> None:
    """By its place, where there are several."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.last(self.first(x))
            return out, (-1 - out.abs()).log()

    kept = torch.tensor([0, 1, 1, 1])
    masks = {"first": {"weight": kept[:, None].expand(4, 3), "bias": kept}}
    with pytest.raises(VerificationError, match="own output 1 .*not finite"):
        engine.ModelSpeedup(Two().eval(), torch.randn(2, 3), masks, confidence=2).speedup_model()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_constant_beyond_the_range_of_a_bias(dtype: torch.dtype) -> None:
    """It is refused before anything changes, with the name of the bias."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype).eval()
    limit = torch.finfo(dtype).max
    with torch.no_grad():
        model[0].bias.fill_(limit)
        model[1].weight.fill_(2.0)
    kept = torch.tensor([0, 0, 1, 1])
    masks = {"0": {"weight": kept[:, None].expand(4, 3)}}
    with pytest.raises(engine.errors.PlanError, match=r"'1.bias' cannot absorb the constants"):
        engine.ModelSpeedup(model, torch.randn(2, 3, dtype=dtype), masks, confidence=0).speedup_model()
    assert model[0].out_features == 4 and bool(model[1].bias.isfinite().all())
