"""Archives that can be read in two ways."""

from __future__ import annotations

import io
import random
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from engine.files.records import read_record, records_of
from tests.engine.files.hostile import archive, old_file, records


def good() -> bytes:
    """What torch writes."""
    file = io.BytesIO()
    torch.save({"a": torch.arange(300.0), "b": [1]}, file)
    return file.getvalue()


def contents(data: bytes) -> dict[str, bytes]:
    """The records of an archive, by our reader."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return {name: read_record(file, record) for name, record in records_of(file).items()}


def test_what_torch_and_zipfile_write() -> None:
    """The same records as Python's own reader finds, without the folder."""
    expected = {name.partition("/")[2]: data for name, data in records(good()).items()}
    assert contents(good()) == expected == contents(archive(records(good())))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            archive({"a/data.pkl": b"x"}) + good(),
            "not where it claims|not have the size that it claims|overlaps|disagree",
        ),
        (good() + bytes(9), "does not end with"),
        (good()[:-30], "does not end with"),
        (archive({"a/data.pkl": b"x", "b/data.pkl": b"y"}), "several folders"),
        (archive({"a/data.pkl": b"x", "a/DATA.PKL": b"y"}), "two records of the same name"),
        (archive({"data.pkl": b"x"}), "in no folder"),
        (b"", "not an archive"),
        (archive({"a/data.pkl": b"x"}, front=old_file()), "extra bytes before its record 'a/data.pkl'"),
        (archive({"a/data.pkl": b"x", "a/constants.pkl": b"x"}), "'a/constants.pkl', which `torch.save` does not"),
    ],
    ids=["two", "behind", "cut", "folders", "names", "folder", "empty", "front", "script"],
)
def test_refused(data: bytes, message: str) -> None:
    """Two directories, something behind the end or in front, two folders or names that differ by case, TorchScript."""
    with pytest.raises(ValueError, match=message):
        contents(data)


def test_gaps() -> None:
    """Anything between two records, or between the last one and the directory, may be a file for another reader."""
    content = {"a/data.pkl": b"x" * 40, "a/version": b"3"}
    data = archive(content)
    whole = [record.start + record.size for record in records_of(io.BytesIO(data)).values()]
    assert whole[-1] == data.index(b"PK\1\2")
    hidden = {"a/data.pkl": content["a/data.pkl"] + archive({"b/data.pkl": b"y"}), "a/version": b"3"}
    gap = archive(hidden).replace(struct.pack("<L", len(hidden["a/data.pkl"])), struct.pack("<L", 40))
    with pytest.raises(ValueError, match="extra bytes before its record 'a/version'"):
        contents(gap)


def test_header_and_directory_disagree() -> None:
    """Wherever they do, the file is refused, or has the content that another reader sees."""
    content, refused = records(good()), 0
    for seed in range(200):
        data = archive(content, random.Random(seed))
        try:
            mine = contents(data)
        except ValueError:
            refused += 1
        else:
            assert mine.keys() == {name.partition("/")[2] for name in zipfile.ZipFile(io.BytesIO(data)).namelist()}
    assert refused > 100


def test_compressed(tmp_path: Path) -> None:
    """A record that may unpack to any size."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a/data.pkl", bytes(10**6))
    with pytest.raises(ValueError, match="is compressed"):
        contents((tmp_path / "a.zip").read_bytes())
