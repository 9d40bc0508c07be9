"""Attributes that decide whether code runs and that no code sets: recorded at values at which it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording import deciding_attributes
from tests.engine.exactness import channel_masks, masked, randomised, relative_error, run

PLACES: dict[str, tuple[Any, Any]] = {"flag": (False, True), "depth": (2, 3), "_depth": (2, 3), "kind": ("a", "b")}


class Deeper(nn.Module):
    """A network with a layer that runs at another value of an attribute only, of itself or of what it was built by."""

    def __init__(self, place: str, value: Any) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.place, self.flag, self.depth, self._depth, self.kind = place, False, 2, 2, "a"
        self.config = SimpleNamespace(flag=value if place == "config" else False)
        if place != "config":
            setattr(self, place, value)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3) -> (N, 2)."""
        h = self.one(x).relu()
        if self.place == "flag":
            if self.flag:
                h = self.two(h).tanh()
        elif self.place == "config":
            if self.config.flag:
                h = self.two(h).tanh()
        elif self.place == "depth":
            if self.depth >= 3:
                h = self.two(h).tanh()
        elif self.place == "_depth":
            if self._depth >= 3:
                h = self.two(h).tanh()
        elif self.kind == "b":
            h = self.two(h).tanh()
        return self.head(h)  # type: ignore[no-any-return]


class Narrower(nn.Module):
    """A network that the other value of a flag makes fail on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head, self.flag = nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(8, 2), False

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3) -> (N, 2)."""
        h = self.one(x).relu()
        if self.flag:
            h = self.two(h)
        return self.head(h)  # type: ignore[no-any-return]


class Filled(nn.Module):
    """A body of transformers' form: an attribute fills in for a flag that the caller leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 8)
        self.config = SimpleNamespace(collect=False, as_object=True)

    def forward(self, x: Tensor, collect: bool | None = None, as_object: bool | None = None) -> Any:
        """(N, 3) -> (N, 8), and what lies before it."""
        collect = collect if collect is not None else self.config.collect
        as_object = as_object if as_object is not None else self.config.as_object
        collected = () if collect else None
        h = self.one(x).relu()
        if collect:
            collected = (*collected, h)  # type: ignore[misc]
        last = self.two(h).tanh()
        if not as_object:
            return last, collected
        return SimpleNamespace(last=last, collected=collected)


class Headed(nn.Module):
    """A head that takes the body's results by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Filled(), nn.Linear(8, 2)

    def forward(self, **inputs: Any) -> Tensor:
        """(N, 3) -> (N, 2)."""
        return self.head(self.body(**inputs).last)  # type: ignore[no-any-return]


class EitherForm(Headed):
    """A head that takes results in both forms, and another part of a tuple."""

    def forward(self, x: Tensor, as_object: bool | None = None) -> Tensor:  # type: ignore[override]
        """(N, 3) -> (N, 2)."""
        out = self.body(x, as_object=as_object)
        if isinstance(out, tuple):
            return self.head(out[0].flip(1))  # type: ignore[no-any-return]
        return self.head(out.last)  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["flag", "config", "depth", "_depth", "kind"])
def test_a_value_that_a_user_sets_later(place: str) -> None:
    """The compacted network is exact at both values, and as small as one in which all of it runs."""
    value, other = PLACES.get(place, (False, True))
    x, net = torch.randn(5, 3, dtype=torch.float64), randomised(Deeper(place, value))
    masks = channel_masks(net, seed=1)
    masks.pop("head")
    repaired = engine.fix_mask_conflict(masks, net, x)
    reference = masked(net, repaired)
    small = engine.ModelSpeedup(net, x, repaired).speedup_model()
    assert not engine.trace(Deeper(place, value).eval(), x.float()).notes
    assert small.one.weight.shape[0] < 8 and small.two.weight.shape[0] < 8
    for now in (value, other):
        for model in (reference, small):
            setattr(model.config if place == "config" else model, "flag" if place == "config" else place, now)
        assert relative_error(run(reference, x), run(small, x)) <= 1e-9


def test_without_the_run_the_code_keeps_all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what a run at the other value saves."""
    monkeypatch.setattr(deciding_attributes, "MOST_DECIDING_SETTINGS", 0)
    x = torch.randn(5, 3)
    groups = engine.dependency_groups(Deeper("config", False), x)
    assert "which did not run" in str(groups[0])


def test_a_value_that_the_model_rejects() -> None:
    """What did not run keeps its channels, and is named."""
    x = torch.randn(5, 3)
    graph = engine.trace(Narrower(), x)
    assert any("did not run" in note for note in graph.notes)
    groups = engine.dependency_groups(Narrower(), x, graph=graph)
    assert "which did not run" in str(groups[0])


def _compacted(net: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    masks = {name: own for name, own in channel_masks(net, seed=1).items() if name != "head"}
    repaired = engine.fix_mask_conflict(masks, net, inputs)
    return masked(net, repaired), engine.ModelSpeedup(net, inputs, repaired).speedup_model()


def test_an_attribute_that_fills_in_for_an_argument() -> None:
    """The body is as small as one without flags, one that works and one that makes the head fail."""
    inputs = {"x": torch.randn(5, 3, dtype=torch.float64)}
    reference, small = _compacted(randomised(Headed()), inputs)
    assert small.body.one.out_features < 8 and small.body.two.out_features < 8
    for collect in (False, True):
        for model in (reference, small):
            model.body.config.collect = collect
        with torch.no_grad():
            assert relative_error([reference(**inputs)], [small(**inputs)]) <= 1e-9


def test_a_flag_at_which_a_head_takes_the_other_form() -> None:
    """Keeps what that form needs: a check of its type may come out otherwise."""
    x = torch.randn(5, 3, dtype=torch.float64)
    reference, small = _compacted(randomised(EitherForm()), x)
    for as_object in (True, False):
        assert relative_error(run(reference, x, as_object), run(small, x, as_object)) <= 1e-9
