"""Files that claim more than they hold, or would run code."""

from __future__ import annotations

import os
import resource
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError
from engine.files.archive import read_archive
from engine.files.records import records_of


def rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with its pickle passed through a function, and its records compressed or not."""
    target = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", compression) as new:
        for record in old.infolist():
            data = old.read(record)
            new.writestr(record.filename, change(data) if record.filename.endswith("data.pkl") else data)
    return target


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A file with two tensors."""
    torch.save({"a": torch.arange(300.0), "b": torch.ones(5)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_reads_what_torch_saves(archive: Path) -> None:
    """Tensors, nested containers, and a device to map to."""
    assert torch.equal(read_archive(archive)["a"], torch.arange(300.0))
    assert read_archive(archive, "meta")["b"].device.type == "meta"
    assert read_archive(archive, lambda storage, location: storage)["b"].tolist() == [1] * 5


def claim(numel: int) -> Any:
    """Let the first storage and its tensor claim another number of elements."""
    old = b"M" + struct.pack("<H", 300)
    return lambda data: data.replace(old, b"J" + struct.pack("<i", numel))


@pytest.mark.parametrize("numel", [301, 2**31 - 1])
def test_a_storage_larger_than_its_record(archive: Path, numel: int) -> None:
    """Refused: nothing is read from memory behind it, and nothing is allocated for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="does not have the size of its record"):
        read_archive(rewritten(archive, claim(numel)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_compressed_records(archive: Path) -> None:
    """A compressed record may unpack to any size, and torch writes none: refused."""
    with pytest.raises(CheckpointError, match="is compressed"):
        read_archive(rewritten(archive, lambda data: data, zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1).expand(10_000_000_000), "claim much more memory"),
        (bytearray(8), "builtins.bytearray"),
        (torch.zeros(2).to_sparse(), "sparse_tensor"),
        (torch.zeros(2, device="meta"), "meta"),
        (Path("x"), "cannot be read"),
    ],
    ids=["expanded", "bytearray", "sparse", "meta", "object"],
)
def test_what_may_claim_any_amount_of_memory(tmp_path: Path, value: Any, message: str) -> None:
    """Refused by name; so are objects of other classes."""
    torch.save({"x": value}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        read_archive(tmp_path / "x.pt")


def test_a_small_file_that_stands_for_a_huge_tree(tmp_path: Path) -> None:
    """Nested lists that hold the one below twice are walked once."""
    tree: Any = [torch.ones(1)]
    for _ in range(60):
        tree = [tree, tree]
    torch.save({"x": tree, "count": Counter("aab")}, tmp_path / "x.pt")
    assert read_archive(tmp_path / "x.pt")["count"] == {"a": 2, "b": 1}


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_code_does_not_run(tmp_path: Path) -> None:
    """A pickle that would run code is refused, and the code has not run."""
    torch.save({"x": Code(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_archive(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("device", ["hpu", "nonsense"])
def test_a_device_that_is_not_there(archive: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not make the file a damaged one: the error says what to pass, also if the file names the device."""
    with pytest.raises(CheckpointError, match=f"a.pt cannot be loaded. Its tensors .* to '{device}' .*map_location"):
        read_archive(archive, device)
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: device)
    torch.save({"a": torch.ones(2)}, archive)
    with pytest.raises(CheckpointError, match=f"cannot be moved to '{device}'"):
        read_archive(archive, None)
    for map_location in ("cpu", {device: "cpu"}, lambda storage, location: storage):
        assert torch.equal(read_archive(archive, map_location)["a"], torch.ones(2))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_truncated(archive: Path, share: float) -> None:
    """A file that is cut off anywhere is one clear error."""
    archive.write_bytes(archive.read_bytes()[: int(archive.stat().st_size * share)])
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read: it is truncated"):
        read_archive(archive)


def test_no_file(tmp_path: Path) -> None:
    """A path without a file is named."""
    with pytest.raises(CheckpointError, match="no checkpoint .*gone"):
        read_archive(tmp_path / "gone.pt")


@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
def test_a_byte_that_was_flipped(tmp_path: Path, record: str) -> None:
    """The file's own checksums tell of it, which torch's reader does not look at."""
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.arange(8.0)}, path)
    with open(path, "rb") as file:
        start = records_of(file)[record].start
    damaged = bytearray(path.read_bytes())
    place = start if record == "data/0" else damaged.index(b"weight")
    damaged[place] ^= 1
    path.write_bytes(damaged)
    torch.load(path, weights_only=True)
    with pytest.raises(CheckpointError, match=f"'{record}' was modified"):
        read_archive(path)


def test_a_file_without_checksums(tmp_path: Path) -> None:
    """It is read where torch was told to write none."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(8.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_archive(tmp_path / "x.pt")["weight"].tolist() == list(range(8))
