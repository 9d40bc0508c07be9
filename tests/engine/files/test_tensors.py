"""Files of safetensors that claim more than they hold."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.files.tensors import check_text, opened_tensors

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def written(path: Path, header: Any, data: bytes = bytes(8), length: int | None = None) -> Path:
    """A file with a header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_it_reads_what_the_package_writes(tmp_path: Path) -> None:
    """Values, dtypes, shapes, and the metadata; each tensor has memory of its own."""
    package = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.empty(0, 2)}
    package.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    with opened_tensors(tmp_path / "a.safetensors") as file:
        loaded = {name: file.read(name) for name in file.places}
        assert file.metadata == {"format": "pt"}
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert all(
        torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in tensors.items()
    )


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"a": {**ENTRY, "shape": [10**12]}}, bytes(8), None),
        ({"a": {**ENTRY, "data_offsets": [0, 10**12]}}, bytes(8), None),
        ({"a": {**ENTRY, "shape": [-2]}}, bytes(8), None),
        ({"a": ENTRY, "b": ENTRY}, bytes(8), None),
        ({"a": ENTRY}, bytes(9), None),
        ({"a": ENTRY}, bytes(8), 2**40),
        (b"[" * 10**6, b"", None),
        ([1], b"", None),
        ({"__metadata__": {"a": 1}}, b"", None),
    ],
)
def test_refused(tmp_path: Path, header: Any, data: bytes, length: int | None) -> None:
    """Shapes, offsets and lengths that do not fit, and headers that are none."""
    path = written(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises((ValueError, TypeError, AttributeError)), opened_tensors(path) as file:
        file.read("a")


def test_a_text_of_brackets() -> None:
    """Objects that take a hundred bytes for each of the text."""
    check_text('{"a": [1, 2]}', 100)
    with pytest.raises(ValueError, match="more memory"):
        check_text("{}," * 10**5, 3 * 10**5)
