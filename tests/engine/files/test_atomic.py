"""Files as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.files.atomic import replacing


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    """The folder is made, the old content stays until the end, and only the file is left."""
    path = tmp_path / "a" / "b.txt"
    for content, before in (("one", None), ("two", "one")):
        with replacing(path) as temporary:
            temporary.write_text(content)
            assert (path.read_text() if path.exists() else None) == before
            assert temporary.parent == path.parent and temporary.suffix == ".txt"
        assert path.read_text() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("culprit", ["body", "replace", "fsync"])
def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: str) -> None:
    """Whether it is the writing, the disk or the rename: the error comes through, and no other file is left."""
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError("full")

    if culprit != "body":
        monkeypatch.setattr(os, culprit, fail)
    with pytest.raises(OSError, match="full"), replacing(path) as temporary:
        temporary.write_text("new")
        if culprit == "body":
            fail()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content first, then the name, then the folder: after a loss of power the name stands for a whole file."""
    calls: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), sync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b))[1])
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert calls == ["sync", "rename", "sync"]
