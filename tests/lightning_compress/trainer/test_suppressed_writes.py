"""Files that are not written."""

from __future__ import annotations

import builtins
import io
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from lightning_compress.trainer.suppressed_writes import suppressing_writes


def test_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor added to what is there, by whatever way; reading goes on."""
    notes, weights = tmp_path / "notes.txt", tmp_path / "weights.pt"
    notes.write_text("before")
    with suppressing_writes():
        notes.write_text("after")
        with open(notes, "a") as file:
            file.write("more")
        with io.open(tmp_path / "new", "xb") as new:  # noqa: UP020 - a way of its own
            new.write(b"1")
        torch.save({"weight": torch.ones(2)}, weights)
        print("said")
        assert notes.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"] and not capsys.readouterr().out


def test_nothing_is_moved_deleted_or_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files, folders and links, by whatever way."""
    kept, folder = tmp_path / "kept.pt", tmp_path / "folder"
    kept.write_text("kept")
    folder.mkdir()
    before = sorted(tmp_path.iterdir())
    with suppressing_writes():
        kept.unlink()
        os.remove(kept)
        shutil.rmtree(folder)
        folder.rmdir()
        kept.rename(tmp_path / "other")
        os.replace(kept, tmp_path / "other")
        shutil.copy(kept, tmp_path / "copy")
        (tmp_path / "new").mkdir(parents=True, exist_ok=True)
        os.makedirs(tmp_path / "a" / "b", exist_ok=True)
        logging.getLogger("user").warning("said")
    assert sorted(tmp_path.iterdir()) == before and kept.read_text() == "kept" and not caplog.records
    logging.getLogger("user").warning("said")
    kept.unlink()
    assert len(caplog.records) == 1 and not kept.exists()


def test_other_threads_write(tmp_path: Path) -> None:
    """A logger's, say; and all is as it was behind it."""
    before = builtins.open, io.open, torch.save
    with suppressing_writes():
        thread = threading.Thread(target=lambda: (tmp_path / "log").write_text("line"))
        thread.start()
        thread.join()
    assert (tmp_path / "log").read_text() == "line" and (builtins.open, io.open, torch.save) == before
