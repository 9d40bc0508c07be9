"""Whether a class computes what the model in memory does."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import InputError, TraceError
from engine.verification import Rescaled
from lightning_compress.stock.agreement import agree, check_reached, evaluating, fitted, measured
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


def test_an_eps_of_its_own_shows_where_float64_does_not_run() -> None:
    """Then the two are compared in the model's precision."""
    norms = {"first": Rescaled("RootMeanSquare", 4, 2, {}, {"eps": 2e-5}, True)}
    model = narrowed(0.5)
    model.inner.forward = functools.partial(F.linear, weight=model.inner.weight, bias=model.inner.bias)  # type: ignore
    found = fit(model, norms)
    assert found.exact and found.shared == {"second": 2e-5}


def test_two_of_one_class_agree_but_for_rounding() -> None:
    """More than rounding is a difference, and so is what stays in float64."""
    one = nn.Linear(3, 3)
    other, far = copy.deepcopy(one), copy.deepcopy(one)
    far.bias.data += 1e-5
    x = torch.ones(1, 3)
    assert agree(one, other, 1e-7, x) and agree(one, other, 5e-6, x)
    assert not agree(one, far, 5e-6, x) and not agree(one, other, 1.0, x)


class Grouped(Model):
    """A model that runs only with widths of which its groups are a part."""

    def forward(self, words: Tensor, other: bool = False) -> Tensor:
        """Return three numbers for each word."""
        self.embed(words).unflatten(-1, (-1, self.groups))
        return super().forward(words, other)

    groups = 4


def test_a_class_that_does_not_run_is_no_fit() -> None:
    """What it raises is kept, so that another configuration can be tried; what the model itself raises, is raised."""
    model, form = narrowed(), Format(Grouped, {"width": 4, "eps": 1e-5})
    norms = {"first": Rescaled("RootMeanSquare", 4, 2, {}, {"eps": 2e-5}, True)}
    other = differing(look_at(model), look_at(form.build(VALUES)))
    fit = fitted(model, form, VALUES, norms, other, {"words": WORDS})
    assert not fit.exact and fit.error == math.inf and fit.failure.startswith("RuntimeError: ")
    with pytest.raises(TraceError, match="nothing"):
        fitted(model, form, VALUES, norms, other, {"nothing": WORDS})


def test_outputs_are_measured_on_several_inputs() -> None:
    """The largest difference, relative to the largest output."""
    one, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    other.weight.data.copy_(one.weight.data * 1.5)
    assert measured(one, one, torch.ones(1, 1)) == 0 and measured(one, other, torch.ones(1, 1)) == pytest.approx(0.5)


def test_what_the_inputs_do_not_reach_is_named() -> None:
    """Nothing shows that it computes the same."""
    search = Search(FORM.build, {("width",): 4}, look_at(Model(2)))
    with pytest.raises(InputError, match=r"do not use 'other\.weight'"):
        check_reached(Model(2), search, {"words": WORDS})


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
