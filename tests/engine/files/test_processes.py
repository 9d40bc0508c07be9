"""Files that other processes write, cut off or overwrite meanwhile, and disks that are full; processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import engine
from engine.files.checkpoint import KEY, content_of, read_checkpoint, seal
from engine.files.portable import write_safetensors

ROOT = Path(__file__).parents[3]


def process(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run code in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def finished(running: subprocess.Popen[str]) -> str:
    """What a process printed; it has to end well."""
    out, error = running.communicate(timeout=600)
    assert running.returncode == 0, (running.returncode, out, error)
    return out


def checkpoint(value: float) -> dict[str, object]:
    """A sealed checkpoint of a compacted network of which all weights are one number."""
    model, mask = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.arange(256) % 2
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(value)
    masks = {"0": {"weight": mask.view(256, 1).expand(256, 64), "bias": mask}}
    engine.ModelSpeedup(model, torch.ones(1, 64), masks).speedup_model()
    return seal({"state_dict": model.state_dict(), KEY: content_of(model)})


VANDAL = """
import itertools, os, sys, time
path, contents = sys.argv[1], [open(name, "rb").read() for name in sys.argv[2:]]
print("ready", flush=True)
end = time.monotonic() + 20
for turn in itertools.count():
    data = contents[turn % 2]
    with open(path, "r+b") as file:  # in place, as no sensible program does
        for start in range(0, len(data), 8192):
            file.write(data[start : start + 8192])
            file.flush()
        if turn % 3 == 0:
            file.truncate(len(data) // 2)
    if time.monotonic() > end or os.path.exists(path + ".stop"):
        break
"""
READER = """
import sys, torch
from torch import nn
from engine.errors import CheckpointError
from engine.files.checkpoint import load_compacted_state
values, refused = set(), 0
for _ in range(int(sys.argv[2])):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        load_compacted_state(model, sys.argv[1])
    except CheckpointError:
        refused += 1
        after = model.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    else:
        (value,) = torch.cat([parameter.flatten() for parameter in model.parameters()]).unique().tolist()
        values.add(value)
assert values <= {1.0, 2.0}, values
print(refused, len(values))
"""


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_overwritten_and_cut_off_while_reading(tmp_path: Path, ending: str) -> None:
    """Each reading gives one of the two contents, whole, or one clear error; no process dies, no module is changed."""
    names = [tmp_path / f"{number}.{ending}" for number in (1, 2)]
    for number, name in enumerate(names, 1):
        content = checkpoint(float(number))
        if ending == "ckpt":
            torch.save(content, name)
        else:
            portable(content, name)
    path = tmp_path / f"shared.{ending}"
    path.write_bytes(names[0].read_bytes())
    vandal = process(VANDAL, path, *names)
    assert vandal.stdout is not None and vandal.stdout.readline() == "ready\n"
    refused = int(finished(process(READER, path, 60)).split()[0])
    (tmp_path / f"shared.{ending}.stop").touch()
    finished(vandal)
    assert refused  # it was noticed; otherwise the files were never met in the middle


def portable(content: dict[str, object], path: Path) -> None:
    """Write a checkpoint as safetensors."""
    pytest.importorskip("safetensors")
    write_safetensors({**content, "state_dict": dict(content["state_dict"])}, path)  # type: ignore[call-overload]


SAVER = """
import sys, torch
from lightning_compress.checkpoints.compacted import write, write_new
from pathlib import Path
content, path, kind = torch.load(sys.argv[1], weights_only=True), Path(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
for _ in range(10):
    print(write_new(content, path) if kind == "new" else write(content, path), flush=True)
"""


def test_two_writers_to_one_path(tmp_path: Path) -> None:
    """Whoever is last wins; at any moment the file is the one or the other, whole."""
    for number in (1, 2):
        torch.save(checkpoint(float(number)), tmp_path / f"{number}.pt")
    path = tmp_path / "out" / "compacted.ckpt"
    writers = [process(SAVER, tmp_path / f"{number}.pt", path, "same") for number in (1, 2)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        assert writer.stdout.readline()
    assert finished(process(READER, path, 20)).split()[0] == "0"
    for writer in writers:
        finished(writer)
    assert [file.name for file in path.parent.iterdir()] == ["compacted.ckpt"]


def test_two_writers_that_number_their_files(tmp_path: Path) -> None:
    """Nobody overwrites the other's: all twenty are there, and each is whole."""
    for number in (1, 2):
        torch.save(checkpoint(float(number)), tmp_path / f"{number}.pt")
    path = tmp_path / "out" / "compacted.ckpt"
    writers = [process(SAVER, tmp_path / f"{number}.pt", path, "new") for number in (1, 2)]
    written = [line for writer in writers for line in finished(writer).splitlines() if line != "ready"]
    assert len(set(written)) == 20 and {str(file) for file in path.parent.iterdir()} == set(written)
    for file in written:
        read_checkpoint(file)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of one megabyte, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


FILLER = """
import sys, torch
from pathlib import Path
from engine.errors import CheckpointError
from engine.files.atomic import check_writable
from lightning_compress.checkpoints.compacted import write
path, content = Path(sys.argv[1]), {"state_dict": {"a": torch.ones(2**19)}}
content["lightning_compress"] = {"version": 2, "compacted": {}, "sha256": None}
for attempt in (lambda: check_writable(path, 2**21), lambda: write(content, path)):
    try:
        attempt()
    except CheckpointError as error:
        print(error)
"""


def test_a_file_system_of_one_megabyte(tmp_path: Path) -> None:
    """Too small is said before, and full while writing: the old file is as it was, and no other is left."""
    with small_disk(tmp_path / "disk") as folder:
        path = folder / "a.ckpt"
        path.write_text("old")
        before, during = finished(process(FILLER, path)).splitlines()
        assert "may take 2 MB, but only 1 MB are free" in before
        assert "could not be written: No space left on device. Existing files are unchanged" in during
        assert path.read_text() == "old" and [file.name for file in folder.iterdir()] == ["a.ckpt"]


def test_a_file_system_that_is_read_only(tmp_path: Path) -> None:
    """Said before anything is written, in these words."""
    with small_disk(tmp_path / "disk") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        out = finished(process(FILLER, folder / "a.ckpt"))
        assert out.count("could not be written: Read-only file system") == 2
