"""Tests of functions named as strings."""

from __future__ import annotations

import math

import pytest

from lightning_compress.trainer.imports import imported
from lightning_compress.trainer.packages import MisconfigurationException


def test_colon_and_point() -> None:
    """Both ways of writing an import path find the function, attributes of classes included."""
    assert imported("math:floor", "schedule", []) is math.floor
    assert imported("math.floor", "schedule", []) is math.floor
    assert imported("builtins:float.fromhex", "schedule", []) == float.fromhex


def test_a_slip_of_the_pen() -> None:
    """What is near is named."""
    with pytest.raises(MisconfigurationException, match=r"l1, l2, taylor.*Did you mean 'l1'\?$"):
        imported("L1", "criterion", ["l1", "l2", "taylor"])
    with pytest.raises(MisconfigurationException, match=r"\('package.module:function'\)\.$"):
        imported("magnitude", "criterion", ["l1", "l2", "taylor"])


@pytest.mark.parametrize("path", ["l3", "no.such:thing", "math:", ":floor", "math.nothing", 3, "math:pi"])
def test_what_is_none_is_an_error(path: object) -> None:
    """The error names the argument, the path, and what else may stand there."""
    with pytest.raises(MisconfigurationException, match="`criterion=.*(l1, l2|not a function)"):
        imported(path, "criterion", ["l2", "l1"])
