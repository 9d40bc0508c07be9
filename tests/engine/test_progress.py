"""Progress of what takes long."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import progress


def test_a_log_file_gets_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in the first two seconds, then one line per quarter of a minute, with the time that is left."""
    clock = iter([0.0, 1.0, 4.0, 10.0, 20.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress.bar(10, "Sensitivity", "evaluations") as shown:
        for _ in range(4):
            shown.update(1)
    assert capsys.readouterr().err.splitlines() == [
        "Sensitivity: 2 of 10 evaluations in 4 s, about 16 s left",
        "Sensitivity: 4 of 10 evaluations in 20 s, about 30 s left",
    ]


@pytest.mark.parametrize("place", ["terminal", "notebook", "colab"])
def test_terminals_and_notebooks_get_a_bar(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's stderr is not a terminal, and shows a bar all the same."""
    pytest.importorskip("tqdm")
    kernel = type("ZMQInteractiveShell", (), {})()
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    elif place == "colab":
        monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    else:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.bar(3, "Sensitivity", "evaluations") as shown:
        assert type(shown).__name__ == "tqdm" and shown.total == 3 and shown.delay == progress.DELAY


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several processes the first one speaks."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    with progress.bar(3, "Sensitivity", "evaluations") as shown, progress.notice("Verifying", delay=0.01):
        time.sleep(0.1)
    assert shown is None and capsys.readouterr().err == ""


def test_a_notice_comes_late_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quick says nothing."""
    written: list[str] = []
    stream: Any = SimpleNamespace(write=written.append)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.notice("Verifying", delay=30):
        pass
    assert not written
    with progress.notice("Verifying", delay=0.01):
        time.sleep(0.2)
    assert written == ["Verifying …\n"]
