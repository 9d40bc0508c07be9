"""Archives that can be read in two ways."""

from __future__ import annotations

import io
import random
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from engine.files.records import read_record, records_of
from tests.engine.files.hostile import archive, records


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
        (archive({"a/data.pkl": b"x"}) + good(), "not where it says|not the size that it says|overlaps|disagree"),
        (good() + bytes(9), "does not end with"),
        (good()[:-30], "does not end with"),
        (archive({"a/data.pkl": b"x", "b/data.pkl": b"y"}), "several folders"),
        (archive({"a/data.pkl": b"x", "a/DATA.PKL": b"y"}), "two records of one name"),
        (archive({"data.pkl": b"x"}), "in no folder"),
        (b"", "no archive"),
    ],
    ids=["two", "behind", "cut", "folders", "names", "folder", "empty"],
)
def test_refused(data: bytes, message: str) -> None:
    """Two directories, something behind the end, two folders or names that differ by case only."""
    with pytest.raises(ValueError, match=message):
        contents(data)


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
