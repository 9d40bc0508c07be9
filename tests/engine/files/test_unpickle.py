"""Pickles by a list of what they may hold."""

from __future__ import annotations

import pickle
import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import CheckpointError
from engine.files.archive import read_archive
from engine.files.unpickle import unpickled
from tests.engine.files.hostile import Raw

RAW = Raw(random.Random(0))


def read(data: bytes, memory: int = 2**20) -> Any:
    """A pickle without storages."""
    return unpickled(b"\x80\x02" + data + b".", lambda *_: torch.UntypedStorage(16), memory, 2**20)


def test_plain_values_and_tensors(tmp_path: Path) -> None:
    """Everything that a checkpoint of Lightning is made of comes back as torch reads it."""
    weights = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).state_dict()
    tensors = [torch.ones(2, 3).t(), torch.ones(2, dtype=torch.uint16), torch.ones(1).expand(9), torch.tensor(1 + 2j)]
    plain = [1, -1, 2**40, 1.5, None, True, b"ab\xff", "é", (1,), {1, 2}, 1j, torch.Size([1, 2]), torch.float32]
    value = {"w": weights, "t": tensors, "x": plain, "c": Counter("aab"), "p": nn.Parameter(torch.ones(2)), 3: {}}
    torch.save(value, tmp_path / "a.pt")
    loaded, expected = read_archive(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["x"] == expected["x"] and loaded["c"] == expected["c"]
    assert loaded["w"]._metadata == expected["w"]._metadata and isinstance(loaded["w"], OrderedDict)
    assert all(torch.equal(loaded["w"][name], value) for name, value in expected["w"].items())
    for one, other in zip(loaded["t"], expected["t"], strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    assert loaded["p"].requires_grad and isinstance(loaded["p"], nn.Parameter)


def test_names_of_one_tensor_stay_one(tmp_path: Path) -> None:
    """Twelve names of a tied weight are one tensor, and no claim of twelve times the file."""
    weight = torch.ones(2**21)
    torch.save({str(n): weight.detach() for n in range(12)}, tmp_path / "a.pt")
    loaded = read_archive(tmp_path / "a.pt")
    assert len({id(tensor) for tensor in loaded.values()}) == 1


def tensor(sizes: bytes, strides: bytes) -> bytes:
    """A tensor over a storage of four numbers."""
    return RAW.call("torch._utils._rebuild_tensor_v2", RAW.storage(), b"K\0", sizes, strides, b"\x89", b"N")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Nr" + struct.pack("<I", 2**31), "ends in the middle|^$"),
        (b"]q\x01h\x01a", "hold themselves"),
        (b"]" * 200 + b"a" * 199, "nested too deep"),
        (b"](" + b"}" * 20_000 + b"e", "more memory"),
        (b"\x8a\xff" + bytes(255), "implausible size"),
        (b"cos\nmkdir\n(X\x01\0\0\0xtR", "os.mkdir"),
        (b"\x95" + bytes(8) + b"N", "instruction"),
        (b"}(" + b"".join(RAW.colliding(n) + b"N" for n in range(2000)) + b"u", "neither text nor small"),
        (RAW.call("builtins.bytearray", b"K\x08"), "bytearray"),
        (tensor(b"K\x09\x85", b"K\1\x85"), "larger"),
        (tensor(b"J\xff\xff\xff\x3f\x85", b"K\0\x85"), "claim"),
        (b"X\xff\xff\xff\xffx", "too early"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    """What stands for much more than it is, and what runs code."""
    if message.endswith("^$"):  # an entry of the memo takes one place, whatever its number
        assert read(data) is None
        return
    with pytest.raises(ValueError, match=message):
        read(data)


def test_bytes_are_encoded_within_a_limit() -> None:
    """A text that is encoded again and again counts each time."""
    text = b"X" + struct.pack("<I", 10_000) + b"x" * 10_000 + b"q\x01"
    again = RAW.call("_codecs.encode", b"h\x01", RAW.text("latin1"))
    assert read(text + b"]" + again + b"a\x86")[1] == [b"x" * 10_000]
    with pytest.raises(ValueError, match="more memory"):
        read(text + b"](" + again * 200 + b"e\x86")


class Own:
    """A class of the user's."""

    def __init__(self, width: int) -> None:
        self.width = width


@contextmanager
def vouched(cls: type) -> Iterator[None]:
    """Declare a class safe for the length of the body."""
    with torch.serialization.safe_globals([cls]):
        yield


def test_what_the_user_vouched_for(tmp_path: Path) -> None:
    """A class is refused by name, with what to do; declared safe, it is read."""
    torch.save({"x": Own(3)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"Own.*add_safe_globals"):
        read_archive(tmp_path / "a.pt")
    with vouched(Own):
        assert read_archive(tmp_path / "a.pt")["x"].width == 3


@pytest.mark.parametrize("protocol", [0, 3, 4, 5])
def test_other_protocols(protocol: int) -> None:
    """`torch.save` writes protocol 2."""
    with pytest.raises(ValueError, match="protocol|instruction"):
        unpickled(pickle.dumps({"a": 1}, protocol), lambda *_: torch.UntypedStorage(0), 2**20, 2**20)
