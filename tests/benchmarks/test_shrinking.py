"""The picture of channels that go over a fit, in its smallest form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import shrinking


def test_a_fit_becomes_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All channels at the start, half of them at the end, and one accuracy for each epoch."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    channels, accuracies = shrinking.fit(epochs=4, width=4, limit=128)
    assert len(accuracies) == 4 and all(len(own) == 5 for own in channels.values())
    first, last = (sum(own[n] for own in channels.values()) for n in (0, -1))
    assert 0.4 * first < last < 0.6 * first
    monkeypatch.setattr(shrinking, "fit", lambda *arguments: (channels, accuracies))
    monkeypatch.setattr(sys, "argv", ["shrinking.py", "--out", str(tmp_path / "channels.svg")])
    assert shrinking.main() == 0
    assert "over one fit" in (tmp_path / "channels.svg").read_text()
