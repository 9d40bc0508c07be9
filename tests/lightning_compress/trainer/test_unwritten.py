"""Files that are not written."""

from __future__ import annotations

import builtins
import io
import threading
from pathlib import Path

import pytest
import torch

from lightning_compress.trainer.unwritten import unwritten


def test_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor added to what is there, by whatever way; reading goes on."""
    notes, weights = tmp_path / "notes.txt", tmp_path / "weights.pt"
    notes.write_text("before")
    with unwritten():
        notes.write_text("after")
        with open(notes, "a") as file:
            file.write("more")
        with io.open(tmp_path / "new", "xb") as new:  # noqa: UP020 - a way of its own
            new.write(b"1")
        torch.save({"weight": torch.ones(2)}, weights)
        print("said")
        assert notes.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"] and not capsys.readouterr().out


def test_other_threads_write(tmp_path: Path) -> None:
    """A logger's, say; and all is as it was behind it."""
    before = builtins.open, io.open, torch.save
    with unwritten():
        thread = threading.Thread(target=lambda: (tmp_path / "log").write_text("line"))
        thread.start()
        thread.join()
    assert (tmp_path / "log").read_text() == "line" and (builtins.open, io.open, torch.save) == before
