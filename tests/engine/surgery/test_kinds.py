"""The list of kinds, and what a plan does with its exchanges; each kind has a test file of its own."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import get_origin

import pytest
import torch

import engine.surgery
from engine.errors import PlanError
from engine.surgery.attention import Headwise
from engine.surgery.exchange import Exchange
from engine.surgery.kinds import KINDS, exchanges_from, joined, printed, state_of
from engine.surgery.norms import NarrowedNorm
from engine.surgery.spread import Spread

NORM = NarrowedNorm("norm", 8, 6, None)


def test_every_kind_is_listed() -> None:
    """Whoever adds a kind adds it to the list; names in files are unique."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.walk_packages(engine.surgery.__path__, "engine.surgery.")
    ]
    classes = [kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)]
    kinds = {kind for kind in classes if get_origin(kind) is None}  # before Python 3.11, `Mapping[str, int]` is a class
    assert {k for k in kinds if issubclass(k, Exchange) and k is not Exchange} == set(KINDS)
    assert len({kind.kind for kind in KINDS}) == len({kind.title for kind in KINDS}) == len(KINDS)


def test_a_round_trip() -> None:
    """With the name of the kind."""
    (norm, attention) = exchanges_from([state_of(NORM), state_of(Headwise("attend"))])
    assert isinstance(norm, NarrowedNorm) and isinstance(attention, Headwise) and state_of(norm) == state_of(NORM)


def test_an_unknown_kind_is_refused() -> None:
    """A plan of a newer version is not applied in part."""
    with pytest.raises(PlanError, match="unknown kind, 'rescaled'"):
        exchanges_from([{"kind": "rescaled", "module": "norm"}])


def test_two_compactions_as_one() -> None:
    """Exchanges of one module and kind become one, of others follow; what cannot happen twice is an error."""
    later = NarrowedNorm("norm", 6, 5, torch.tensor([2.0], dtype=torch.float64))
    attend = Headwise("attend")
    both, last = joined([NORM], [later, attend])
    assert isinstance(both, NarrowedNorm) and (both.size, both.kept) == (8, 5)
    assert both.fill is not None and both.fill.tolist() == [0, 0, 2] and last is attend
    spread = Spread("layer", 1, 2, torch.arange(2), torch.zeros(1))
    with pytest.raises(PlanError, match="'layer' is spread already"):
        joined([spread], [spread])


def test_printed() -> None:
    """By kind, in the order of the list."""
    lines = dict(printed([Headwise("attend"), NORM]))
    assert list(lines) == [f"{kind.title}:" for kind in KINDS] and lines["Pinned:"] == []
    assert lines["Norms:"] == ["  norm keeps the statistics of 8 channels"]
