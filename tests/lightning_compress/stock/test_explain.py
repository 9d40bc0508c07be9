"""Why a configuration does not describe a network."""

from __future__ import annotations

import math

import pytest
from torch import nn

from engine.errors import InputError, VerificationError
from engine.verification.rescaled import Rescaled
from lightning_compress.stock import explain
from lightning_compress.stock.agreement import Fit
from lightning_compress.stock.formats import Format
from tests.lightning_compress.stock.test_describe import CONFIG, Net, search

FORM = Format(Net, CONFIG)


def test_norms_are_named() -> None:
    """With what they span and what to do."""
    explain.check_norms({"norm": Rescaled("RMSNorm", 8, 4, is_plain=True)})
    with pytest.raises(InputError, match="'norm' .LayerNorm. keeps the statistics of 8 channels of which 4 remain"):
        explain.check_norms({"norm": Rescaled("LayerNorm", 8, 4)})
    with pytest.raises(InputError, match="statistics of 8 channels of which some were removed, and has no weight per"):
        explain.check_norms({"norm": Rescaled("RMSNorm", 8, 0)})


def test_the_parameter_and_its_fields_are_named() -> None:
    """With the shape, and what to change."""
    task = search(width=8, heads=2)
    task.target.shapes["outer.weight"] = (5, 23)
    pattern = r"'outer.weight' has shape \[5, 23\], and \[5, 24\].*`inner`.*uniform=True.*exclude=\['outer'\]"
    with pytest.raises(InputError, match=pattern):
        explain.refuse(task, task.solve()[0], FORM)


def test_only_fields_of_the_dimensions_that_differ_are_named() -> None:
    """A layer's outputs follow another field than its inputs."""
    task = search(width=8, heads=2)
    task.target.shapes["inner.weight"] = (24, 7)
    values = task.solve()[0]
    with pytest.raises(InputError, match=r"'inner.weight' has shape \[24, 7\].*They follow `width` of"):
        explain.refuse(task, values, FORM)


def test_numbers_that_differ_are_named() -> None:
    """With the error that they cause."""
    task = search(width=8, heads=4)
    with pytest.raises(VerificationError, match=r"differ by 5.0e-01 of the largest \(.head_dim is 2 there and 4"):
        explain.refuse_numbers(task, {("width",): 8, ("heads",): 2}, Fit(nn.Module(), 0.5, False), {}, FORM)


def test_what_a_class_raises_is_named() -> None:
    """With the numbers under which it does not run, and what to do."""
    task, fit = search(width=8, heads=2), Fit(nn.Module(), math.inf, False, failure="RuntimeError: k out of range.")
    pattern = r"under width=8, and does not run: RuntimeError: k out of range\. .*`exclude=`"
    with pytest.raises(VerificationError, match=pattern):
        explain.refuse_numbers(task, {("width",): 8}, fit, {}, FORM)
