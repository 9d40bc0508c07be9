"""Weights that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import InputError


class Additive(nn.Module):
    """Adds a stored mask to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.mask = nn.Parameter(torch.full((5, 5), -math.inf).triu(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add a stored mask to scores."""
        scores = (x @ x.transpose(1, 2) + self.mask).softmax(-1)
        out: Tensor = self.last(scores @ self.first(x))
        return out


def masks() -> dict[str, dict[str, Tensor]]:
    """Close the first channel of the first layer."""
    kept = torch.tensor([0, 1, 1, 1])
    return {"first": {"weight": kept[:, None].expand(4, 3), "bias": kept}}


def test_a_mask_that_is_only_added_may_hold_infinities() -> None:
    """Also where it is a parameter."""
    model = Additive().eval()
    speedup = engine.ModelSpeedup(model, torch.randn(2, 5, 3), masks(), confidence=2)
    assert speedup.speedup_model().first.out_features == 3
    assert speedup.certificate.verified


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "last.weight", "last.bias"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("confidence", [0, 2])
def test_a_weight_that_is_not_finite_is_named(name: str, number: float, confidence: int) -> None:
    """Whether or not numbers are compared, and nothing is changed."""
    model = Additive().eval()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = number
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=rf"'{name}' holds .* at \(0,"):
        engine.ModelSpeedup(model, torch.randn(2, 5, 3), masks(), confidence=confidence).speedup_model()
    after = model.state_dict()
    assert all(torch.equal(after[key].nan_to_num(7.0), before[key].nan_to_num(7.0)) for key in before)


def test_a_large_sum_is_no_infinity() -> None:
    """Only entries count."""
    model = Additive().eval()
    with torch.no_grad():
        model.last.weight.fill_(3e38)
    engine.ModelSpeedup(model, torch.randn(2, 5, 3), masks(), confidence=0).speedup_model()
    assert model.last.in_features == 3
