"""Why a configuration does not describe a network."""

from __future__ import annotations

import pytest

from engine.errors import InputError, VerificationError
from engine.verification.rescaled import Rescaled
from lightning_compress.stock import explain
from lightning_compress.stock.formats import Format
from tests.lightning_compress.stock.test_describe import CONFIG, Net, search


def test_norms_are_named() -> None:
    """With what they span and what to do."""
    explain.check_norms({"norm": Rescaled("RMSNorm", 8, 4, is_plain=True)})
    with pytest.raises(InputError, match="'norm' .LayerNorm. keeps the statistics of 8 channels while 4"):
        explain.check_norms({"norm": Rescaled("LayerNorm", 8, 4)})


def test_the_parameter_and_its_fields_are_named() -> None:
    """With the shape, and what to change."""
    task = search(width=8, heads=2)
    task.target.shapes["outer.weight"] = (5, 23)
    pattern = r"'outer.weight' has shape \[5, 23\], and \[5, 24\].*`inner`.*uniform=True.*exclude=\['outer'\]"
    with pytest.raises(InputError, match=pattern):
        explain.refuse(task, task.solve()[0], Format(Net, CONFIG))


def test_numbers_that_differ_are_named() -> None:
    """With the error that they cause."""
    task = search(width=8, heads=4)
    with pytest.raises(VerificationError, match=r"differ by 5.0e-01 of the largest \(.head_dim is 2 there and 4"):
        explain.refuse_numbers(task, {("width",): 8, ("heads",): 2}, 0.5, {}, Format(Net, CONFIG))
