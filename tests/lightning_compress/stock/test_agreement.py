"""Whether a class computes what the model in memory does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import InputError
from engine.verification import Rescaled
from lightning_compress.stock.agreement import check_reached, evaluating, fitted, measured
from lightning_compress.stock.describe import Search, differing, look_at
from lightning_compress.stock.formats import Format
from tests.engine.language import RootMeanSquare


class Scaled(nn.Embedding):
    """An embedding that a number scales, which follows the width."""

    def __init__(self, width: int) -> None:
        super().__init__(5, width)
        self.scale = width**0.5

    def forward(self, words: Tensor) -> Tensor:
        """Return scaled vectors."""
        return super().forward(words) * self.scale


class Model(nn.Module):
    """Two norms with one eps between layers, and a layer that is not always reached."""

    def __init__(self, width: int = 4, eps: float = 1e-5) -> None:
        super().__init__()
        self.embed, self.first, self.second = Scaled(width), RootMeanSquare(width), RootMeanSquare(3)
        self.inner, self.other = nn.Linear(width, 3), nn.Linear(width, 3)
        self.first.eps = self.second.eps = eps

    def forward(self, words: Tensor, other: bool = False) -> Tensor:
        """Return three numbers for each word."""
        x = self.first(self.embed(words))
        return self.other(x) if other else self.second(self.inner(x))

    @classmethod
    def from_config(cls, config: Any) -> Model:
        """Return a model of a width."""
        return cls(**config)


FORM = Format(Model, {"width": 4, "eps": 1e-5})
WORDS = torch.tensor([[0, 1, 2]])
VALUES = {("width",): 2, ("eps",): 2e-5}


def narrowed(eps: float = 2e-5) -> Model:
    """A model of width 2 that has the scale, and another eps in its second norm."""
    torch.manual_seed(0)
    model = Model(2, 2e-5).eval()
    model.embed.scale, model.second.eps = 2.0, eps
    return model


def fit(model: Model, norms: dict[str, Rescaled]) -> Any:
    """Return the class under the configuration of width 2."""
    own, other = look_at(model), look_at(FORM.build(VALUES))
    return fitted(model, FORM, VALUES, norms, differing(own, other), {"words": WORDS})


def test_a_scale_goes_into_the_weight() -> None:
    """A scaled embedding has larger weights where its scale follows the width."""
    found = fit(narrowed(), {"first": Rescaled("RootMeanSquare", 4, 2, {}, {"eps": 2e-5}, True)})
    assert found.exact and not found.shared and found.error <= 1e-6
    assert torch.allclose(found.stock.embed.weight, narrowed().embed.weight * 2**0.5)


def test_a_shared_eps_is_told_from_other_differences() -> None:
    """With its own eps the class computes the same; a class that does not is not exact."""
    norms = {"first": Rescaled("RootMeanSquare", 4, 2, {}, {"eps": 2e-5}, True)}
    found = fit(narrowed(0.5), norms)
    assert found.exact and found.shared == {"second": 2e-5} and found.error > 1e-3
    model = narrowed(0.5)
    model.first.forward = lambda x: x  # type: ignore[method-assign]
    assert not fit(model, norms).exact


def test_outputs_are_measured_on_several_inputs() -> None:
    """The largest difference, relative to the largest output."""
    one, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    other.weight.data.copy_(one.weight.data * 1.5)
    assert measured(one, one, torch.ones(1, 1)) == 0 and measured(one, other, torch.ones(1, 1)) == pytest.approx(0.5)


def test_what_the_inputs_do_not_reach_is_named() -> None:
    """Nothing shows that it computes the same."""
    search = Search(FORM.build, {("width",): 4}, look_at(Model(2)))
    with pytest.raises(InputError, match=r"do not reach 'other\.weight'"):
        check_reached(Model(2), search, {("width",): 2}, {"words": WORDS})


def test_modes_come_back() -> None:
    """Those of the parts, too."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).eval())
    with evaluating(model):
        assert not model.training
    assert model.training and model[0].training and not model[1].training


def test_what_is_more_than_rounding_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the two agree in float64, the difference in float32 is too large to come from rounded weights."""

    def error(model: nn.Module, stock: nn.Module, example: Any) -> float:
        return 0.0 if next(stock.parameters()).dtype == torch.float64 else size

    monkeypatch.setattr("lightning_compress.stock.agreement.measured", error)
    norms = {"first": Rescaled("RootMeanSquare", 4, 2, {}, {"eps": 2e-5}, True)}
    size = 2e-6
    assert fit(narrowed(), norms).exact
    size = 0.1
    assert not fit(narrowed(), norms).exact
