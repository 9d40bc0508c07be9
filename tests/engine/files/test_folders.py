"""Folders of `torch.distributed.checkpoint`, read by a list of what their index may hold."""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from engine.errors import CheckpointError
from engine.files.folders import read_folder_index
from tests.engine.files.hostile import RUNS_CODE, archive, old_file, records

STATE = {
    "state_dict": {
        "a.weight": torch.arange(6.0).view(2, 3).bfloat16(),
        "a.bias": torch.ones(()),
        "b": torch.zeros(0, 2),
    },
    "optimizer_0": {
        "state": {"a.weight": {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.weight"]}],
    },
}


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def save(folder: Path) -> Path:
    """A folder as torch writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        dcp.save({key: dict(value) for key, value in STATE.items()}, checkpoint_id=folder)
    return folder


def metadata(folder: Path) -> Metadata:
    """The index by torch's own reader."""
    index: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return index


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def of_parts(folder: Path, parts: dict[tuple[int, ...], torch.Tensor], shape: tuple[int, ...]) -> Path:
    """A folder with one tensor in parts, one file each, as processes write them."""
    folder.mkdir()
    storage, chunks = {}, []
    for number, (offsets, part) in enumerate(parts.items()):
        data = b"x" * 7 + saved(part)
        (folder / f"__{number}_0.distcp").write_bytes(data)
        storage[MetadataIndex("model.w", offsets, number)] = _StorageInfo(f"__{number}_0.distcp", 7, len(data) - 7)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
    entry = TensorStorageMetadata(TensorProperties(torch.float64), torch.Size(shape), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"model.w": entry}, {"model.w": ("model", "w")}, storage)))
    return folder


def test_what_torch_writes(tmp_path: Path) -> None:
    """Tensors, values, lists and dictionaries come back; only what is asked for is read."""
    index = read_folder_index(save(tmp_path / "a"))
    assert index.keys() == ["state_dict", "optimizer_0"]
    weights, expected = index.state("state_dict"), STATE["state_dict"]
    assert weights.keys() == expected.keys()
    assert all(
        torch.equal(weights[name], value) and weights[name].dtype == value.dtype for name, value in expected.items()
    )
    state = index.state("optimizer_0")
    assert state["param_groups"] == STATE["optimizer_0"]["param_groups"] and state["state"]["a.weight"]["step"] == 3
    assert index.state("state_dict", "meta")["a.weight"].is_meta
    assert index.state("state_dict", {"cpu": "meta"})["a.weight"].is_meta


def test_parts(tmp_path: Path) -> None:
    """A tensor that processes wrote in parts is put together, where the parts make a whole."""
    whole = torch.randn(5, 4).double()
    places = {(0, 0): whole[:3], (3, 0): whole[3:, :1], (3, 1): whole[3:, 1:]}
    parts = {place: part.contiguous() for place, part in places.items()}
    assert torch.equal(read_folder_index(of_parts(tmp_path / "a", parts, (5, 4))).state("model")["w"], whole)
    missing = {place: part for place, part in parts.items() if place != (3, 0)}
    twice = {**parts, (3, 1): parts[3, 0], (4, 1): torch.ones(1, 3).double(), (3, 2): torch.ones(2, 1).double()}
    for name, wrong in {"missing": missing, "twice": twice}.items():
        with pytest.raises(CheckpointError, match="the parts of 'model.w' do not cover it"):
            read_folder_index(of_parts(tmp_path / name, wrong, (5, 4)))
    with pytest.raises(CheckpointError, match="a part of 'model.w' is outside of it"):
        read_folder_index(of_parts(tmp_path / "outside", parts, (5, 3)))
    other = of_parts(tmp_path / "other", {(0,): torch.ones(3)}, (3,))
    with pytest.raises(CheckpointError, match="larger than the bytes|does not contain the expected part of 'model.w'"):
        read_folder_index(other).state("model")


def test_many_small_parts(tmp_path: Path) -> None:
    """What many processes write of small tensors, whose index is as large as the tensors are."""
    whole = torch.arange(4000.0).double().view(1000, 4)
    parts = {(row, 0): whole[row : row + 1].clone() for row in range(1000)}
    assert torch.equal(read_folder_index(of_parts(tmp_path / "a", parts, (1000, 4))).state("model")["w"], whole)


def test_no_code_in_the_index(tmp_path: Path) -> None:
    """Wherever it stands, and however it is called."""
    folder, ran = save(tmp_path / "a"), tmp_path / "ran"
    index, evil = metadata(folder), Code(ran)
    places: list[Metadata] = [
        replace(index, planner_data=evil),
        replace(index, storage_meta=evil),
        replace(index, state_dict_metadata={**index.state_dict_metadata, "x": evil}),  # type: ignore[dict-item]
        replace(index, storage_data={**index.storage_data, "x": evil}),
        evil,  # type: ignore[list-item]
    ]
    for place in places:
        for protocol in range(2, 6):
            (folder / ".metadata").write_bytes(pickle.dumps(place, protocol))
            with pytest.raises(
                CheckpointError, match=r"it contains (posix|nt)\.mkdir, which does not belong in an index"
            ):
                read_folder_index(folder)
    assert not ran.exists()


@pytest.mark.parametrize("form", ["pickle", "old", "front"])
def test_no_code_in_the_files(tmp_path: Path, form: str) -> None:
    """In place of a tensor or value, as a file of any format."""
    folder, ran = save(tmp_path / "a"), tmp_path / "ran"
    index, old = metadata(folder), io.BytesIO()
    torch.save(Code(ran), old, _use_new_zipfile_serialization=False)
    front = archive(records(saved(torch.ones(()))), front=old.getvalue())
    data = {"pickle": saved(Code(ran)), "old": old.getvalue(), "front": front}[form]
    (folder / "evil").write_bytes(data)
    for key in index.storage_data:
        if key.fqn in ("state_dict.a.bias", "optimizer_0.param_groups.0.lr"):
            index.storage_data[key] = _StorageInfo("evil", 0, len(data))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    read = read_folder_index(folder)
    for key in read.keys():
        with pytest.raises(CheckpointError, match="evil cannot be read"):
            read.state(str(key))
    assert not ran.exists()


def entry(shape: tuple[int, ...]) -> TensorStorageMetadata:
    """A tensor in one part."""
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [chunk])


def first(**changes: Any) -> Callable[[Metadata], None]:
    """A change of where the first thing is."""

    def change(index: Metadata) -> None:
        key = next(iter(index.storage_data))
        index.storage_data[key] = replace(index.storage_data[key], **changes)

    return change


def again(index: Metadata) -> None:
    """Many things in one place."""
    place = next(value for key, value in index.storage_data.items() if key.fqn == "state_dict.a.weight")
    index.storage_data.update({MetadataIndex(f"x{n}"): place for n in range(99)})
    index.state_dict_metadata.update({f"x{n}": BytesStorageMetadata() for n in range(99)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (first(relative_path="../other/__0_0.distcp"), "refers to bytes that '../other/__0_0.distcp' does not have"),
        (first(relative_path=3), "a int instead of a name"),
        (first(length=10**9), "does not have"),
        (first(offset=-1), "something other than numbers"),
        (again, "the same bytes repeatedly"),
        (
            lambda index: index.state_dict_metadata.update({"state_dict.a.weight": entry((10**5, 10**6))}),
            "'(0, 0)|larger",
        ),
        (
            lambda index: index.state_dict_metadata.update({"state_dict.a.bias": entry((2**61, 2**61))}),
            "(?i)overflow|0, 0",
        ),
        (
            lambda index: index.state_dict_metadata.update({"state_dict.a.weight": BytesStorageMetadata()}),
            "None state_",
        ),
        (lambda index: index.planner_data.update({"state_dict.a.bias": ()}), "something other than the keys of a"),
        (lambda index: index.planner_data.update({"state_dict.a.bias": (10**9,)}), "an invalid key of a value"),
        (lambda index: index.planner_data.update({"state_dict.a.bias": ("a",) * 1000}), "the keys of a value"),
        (lambda index: index.storage_data.clear(), "None|state_dict"),
        (lambda index: setattr(index, "storage_data", [1]), "a list instead of a dictionary"),
    ],
)
def test_indices_that_lie(tmp_path: Path, change: Callable[[Metadata], None], message: str) -> None:
    """Names outside of the folder, sizes that the files have not, keys that are none."""
    folder = save(tmp_path / "a")
    index = metadata(folder)
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_folder_index(folder)


def test_keys_in_each_other(tmp_path: Path) -> None:
    """A value cannot be a dictionary of others as well."""
    folder = save(tmp_path / "a")
    index = metadata(folder)
    index.planner_data["state_dict.a.bias"] = ("state_dict", "a.weight", "bias")
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="is damaged: it puts a value inside"):
        read_folder_index(folder).state("state_dict")


def test_no_folder(tmp_path: Path) -> None:
    """The error says what is missing; a file of another kind is damaged."""
    with pytest.raises(CheckpointError, match=r"it has no `\.metadata`"):
        read_folder_index(tmp_path)
    for data in (b"", b"\x80\x04", old_file(), saved({}), b"\x80\x04N.", b"\x80\x04]\x94h\x00a.", b"\x80\x06N."):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be read: it is damaged or not an index"):
            read_folder_index(tmp_path)


def test_damaged_anyhow(tmp_path: Path) -> None:
    """Any byte of the index changed: read as it stands, or refused, and nothing is run."""
    folder, ran = save(tmp_path / "a"), []
    reading = [False]
    sys.addaudithook(lambda event, _: ran.append(event) if reading[0] and event in RUNS_CODE else None)
    good, chance = (folder / ".metadata").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 3))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (folder / ".metadata").write_bytes(data)
        reading[0] = True
        try:
            index = read_folder_index(folder)
            [index.state(str(key)) for key in index.keys() if isinstance(key, str)]
        except CheckpointError:
            refused += 1
        reading[0] = False
    assert refused > 100 and not ran
