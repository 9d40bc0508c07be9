"""The call in the user's code."""

from __future__ import annotations

import os

import torch

from engine.source import sites
from engine.source.sites import is_library, user_site


def test_the_line_of_the_user() -> None:
    """The innermost frame outside of torch and the engine."""
    assert user_site("f").place.startswith(__file__)
    assert str(user_site("f")).startswith("tests/engine/source/test_sites.py:")


def test_what_is_a_library() -> None:
    """torch and the recorder are; the engine's own forwards, and what the user wrote, are not."""
    engine = os.path.dirname(sites.__file__)
    assert is_library(torch.nn.functional.__file__) and is_library(os.path.join(engine, "provenance.py"))
    assert not is_library(os.path.join(engine, "ops", "heads.py")) and not is_library(__file__)
