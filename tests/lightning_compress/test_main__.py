"""``python -m lightning_compress`` runs the command."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_it_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--help`` it says what it can do, and ends well."""
    monkeypatch.setattr(sys, "argv", ["lightning_compress", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lightning_compress", run_name="__main__")
    told = capsys.readouterr().out
    assert not end.value.code and all(name in told for name in ("inspect", "compact", "export", "verify"))
