"""Numbers that code of a model assigns once the model is built."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from engine.source import reassigned
from engine.source.reassigned import Reassigned

LIMIT, FLOOR = 1.0, 2.0


def _set_limit(number: float) -> None:
    global LIMIT
    LIMIT = number


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.clip, self.norm = nn.Hardtanh(-2.0, 2.0), nn.LayerNorm(3, eps=1e-3)
        self.bounds, self.margin = [1.0], 0.5
        self.config = SimpleNamespace(low=1.0, high=2.0)

    def open(self, low: float) -> None:
        self.clip.min_val = self.config.low = low
        self.bounds.append(low)

    def reset_parameters(self) -> None:
        self.margin = 0.25


def test_attributes_of_modules_and_of_other_objects() -> None:
    """A method of a model sets them; code that builds it does not count."""
    net = _Net()
    own = Reassigned(net)
    assert own.attribute(net.clip, "min_val") and own.attribute(net.config, "low") and own.attribute(net, "bounds")
    assert not own.attribute(net.clip, "max_val") and not own.attribute(net.config, "high")
    assert not own.attribute(net.norm, "eps") and not own.attribute(net, "margin")


def test_global_variables() -> None:
    """A function of the Python module that defines them sets them."""
    own = Reassigned(_Net())
    assert own.variable(__name__, "LIMIT") and not own.variable(__name__, "FLOOR")
    assert not own.attribute(math, "pi") and not own.attribute(torch, "inf")
    assert not own.attribute(reassigned, "LIMIT_OF_NOTHING")
