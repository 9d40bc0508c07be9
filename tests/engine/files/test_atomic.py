"""Files as a whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.files.atomic import check_writable, next_version, replacing


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


# ---------------------------------------------------------------- processes of their own

ROOT = Path(__file__).parents[3]
LEFT = ".lightning-compress-" + "0" * 32 + ".txt"


def process(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run code in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=env)


WRITER = """
import sys
from engine.files.atomic import replacing
with replacing(sys.argv[1]) as temporary:
    temporary.write_text(sys.argv[2] * 1000)
    print("writing", flush=True)
    sys.stdin.readline()
"""


def test_a_killed_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its temporary file is removed by the next writer; that of a live one stays, and both write whole files."""
    path = tmp_path / "a.txt"
    killed, live = process(WRITER, path, "k"), process(WRITER, path, "l")
    for writer in (killed, live):
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
    killed.kill()
    killed.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    with replacing(path) as temporary:
        temporary.write_text("mine")
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
    out, error = live.communicate()
    assert live.returncode == 0, error
    assert path.read_text() == "l" * 1000 and list(tmp_path.iterdir()) == [path]


def test_what_looks_like_a_leftover(tmp_path: Path) -> None:
    """Links are not followed, folders and files of other names stay."""
    other = tmp_path / "other.txt"
    other.write_text("other")
    (tmp_path / LEFT).symlink_to(other)
    (tmp_path / LEFT.replace("0", "1")).mkdir()
    (tmp_path / LEFT.replace("0", "2")).write_text("left")
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    names = {LEFT, LEFT.replace("0", "1"), "other.txt", "a.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names and other.read_text() == "other"


def test_another_writer_that_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary file is in the list of the folder, and has taken its place by the time that it is looked at."""
    names = os.listdir
    gone = f".lightning-compress-{'0' * 32}.txt"
    monkeypatch.setattr(os, "listdir", lambda folder: [gone, *names(folder)])
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    """Two in a row have nothing in common, and the file is opened as a new one."""
    names = set()
    for _ in range(2):
        with replacing(tmp_path / "a.txt") as temporary:
            names.add(temporary.name)
            temporary.write_text("new")
    assert len(names) == 2


FULL = """
import resource, sys, torch
from engine.errors import CheckpointError
from engine.files.atomic import replacing, save, unwritable
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    with replacing(sys.argv[1]) as temporary:
        save({"a": torch.ones(2**20)}, temporary)
except OSError as error:
    print(unwritable(sys.argv[1], error))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """What the system says is said, the old file is as it was, and nothing is left: here by a limit of 1 MB."""
    path = tmp_path / "a.ckpt"
    path.write_text("old")
    out, error = process(FULL, path).communicate()
    assert "File too large" in out and "inline_container" not in out + error, error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["file.txt/a.ckpt", "x" * 300 + ".ckpt"])
def test_where_nothing_can_be_written(tmp_path: Path, name: str) -> None:
    """No folder, or a name that is too long: said before anything is written, and nothing is left."""
    (tmp_path / "file.txt").write_text("a file")
    with pytest.raises(CheckpointError, match="could not be written: .* Existing files are unchanged"):
        check_writable(tmp_path / name)
    with pytest.raises(OSError), replacing(tmp_path / name):
        pytest.fail("it was opened")
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
    with pytest.raises(CheckpointError, match="could not be written: embedded null byte"):
        check_writable(tmp_path / "a\0.ckpt")


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_place_of_the_folder(tmp_path: Path, kind: str, below: str) -> None:
    """It is an error of another kind than that of a name that is taken."""
    folder = tmp_path / "folder"
    if kind == "file":
        folder.touch()
    else:
        folder.symlink_to(tmp_path / "missing")
    target = folder / below / "a.ckpt"
    with pytest.raises(NotADirectoryError), replacing(target, new=True):
        pass
    with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: "):
        check_writable(target)


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    """The size is compared with the room."""
    check_writable(tmp_path / "a.ckpt", 1)
    with pytest.raises(CheckpointError, match="may take .* MB are free"):
        check_writable(tmp_path / "a.ckpt", 2**60)


def test_versions(tmp_path: Path) -> None:
    """A file that is there is not overwritten; a link that leads nowhere counts too."""
    path = tmp_path / "compacted.ckpt"
    assert next_version(path) == path
    path.symlink_to(tmp_path / "gone")
    assert next_version(path).name == "compacted-v1.ckpt"
    (tmp_path / "compacted-v1.ckpt").touch()
    assert next_version(path).name == "compacted-v2.ckpt"
