"""Tests of the checks of numbers and names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import engine
from engine.bounds import check_number
from engine.errors import InputError


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, True, None, "3", torch.tensor(1.0)])
def test_what_is_no_number_is_named(value: Any) -> None:
    """NaN compares False with everything, and text with nothing."""
    with pytest.raises(InputError, match="`x` must be a .*number >= 0, got "):
        check_number("x", value, 0)


def test_bounds_and_kinds() -> None:
    """Numbers of NumPy count; a bound that must be exceeded does not suffice; halves are no integers."""
    for value in (0, 0.5, np.float32(2), np.int64(3)):
        check_number("x", value, 0)
    with pytest.raises(InputError, match="`x` must be a number > 0, got 0"):
        check_number("x", 0, above=0)
    with pytest.raises(InputError, match="`x` must be an integer >= 1, got 1.5"):
        check_number("x", 1.5, 1, whole=True)
    with pytest.raises(ZeroDivisionError, match="`x` must be a number of steps, got nan"):
        check_number("x", math.nan, what="a number of steps", error=ZeroDivisionError)


@pytest.mark.parametrize("options", [{"ridge": math.nan}, {"ridge": math.inf}, {"samples": "8"}, {"samples": math.nan}])
def test_fits_of_weights_refuse_them(options: dict[str, Any]) -> None:
    """Before anything changes, whichever function takes them."""
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), torch.zeros(1, 2)
    before = net[1].weight.clone()
    name = next(iter(options))
    with pytest.raises(InputError, match=f"`{name}` must be "):
        engine.compensate(net, x, {"0": {"bias": torch.tensor([0, 1, 1, 1])}}, [torch.randn(8, 2)], **options)
    with pytest.raises(InputError, match=f"`{name}` must be "):
        engine.reconstruction_losses(net, x, engine.dependency_groups(net, x), [torch.randn(8, 2)], **options)
    assert torch.equal(net[1].weight, before)


@pytest.mark.parametrize("argument", ["constants", "opaque"])
def test_one_name_is_a_list_of_one(argument: str) -> None:
    """A text is not taken for its letters; what is no text is an error that names the argument."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.register_buffer("scale", torch.ones(1))
    name = {"constants": "scale", "opaque": "0"}[argument]
    assert getattr(engine.trace(net, torch.zeros(1, 2), **{argument: name}), argument) == (name,)
    for wrong in (5, [5]):
        with pytest.raises(InputError, match=f"`{argument}` must be a name pattern or a list of them, got"):
            engine.trace(net, torch.zeros(1, 2), **{argument: wrong})
