"""The call in the user's code."""

from __future__ import annotations

import os

import pytest
import torch

from engine.numbers import sizes
from engine.recording import recorder
from engine.running import provenance
from engine.source import sites
from engine.source.sites import ENGINE, is_library, user_site


def test_the_line_of_the_user() -> None:
    """The innermost frame outside of torch and the engine."""
    assert user_site("f").place.startswith(__file__)
    assert str(user_site("f")).startswith("tests/engine/source/test_sites.py:")


def test_calls_of_one_line_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is looked up once; another on its line, by another name, or from another function is another."""
    monkeypatch.setattr(sites, "_SITES", {})
    same = [user_site("f") for _ in range(3)]
    assert same[0] is same[1] is same[2]
    pair = user_site("f"), user_site("f")
    assert pair[0].line == pair[1].line and (pair[0] != pair[1]) is hasattr(user_site.__code__, "co_positions")
    assert user_site("g") != same[0] and user_site("f", reflected=True).reflected
    monkeypatch.setattr(sites, "_MOST", 2)
    assert [user_site("f").line for _ in range(4)] == [user_site("f").line] * 4 and len(sites._SITES) <= 2


def test_what_is_a_library() -> None:
    """torch and the recorder are; the engine's own forwards, and what the user wrote, are not."""
    assert all(is_library(module.__file__) for module in (torch.nn.functional, provenance, recorder, sizes))
    assert not is_library(os.path.join(ENGINE, "ops", "contraction.py")) and not is_library(__file__)


def test_the_files_of_the_recorder_exist() -> None:
    """Those that are named by their place: a file that moved would count as the user's."""
    assert all(os.path.exists(file) for file in sites._RECORDER)


def test_this_project_is_no_package_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is installed, and not run from its source."""
    folder = "/env/site-packages/engine/"
    monkeypatch.setattr(sites, "ENGINE", folder)
    assert not sites.is_of_a_package(f"{folder}tracer.py") and sites.is_foreign(f"{folder}tracer.py")
    assert sites.is_of_a_package("/env/site-packages/torchmetrics/metric.py")
    assert not sites.is_of_a_package("/home/user/train.py") and not sites.is_foreign("/home/user/train.py")
