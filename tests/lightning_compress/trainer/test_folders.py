"""Torch's loading of folders through a reader that runs nothing; fits are resumed from folders in test_sharded.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric.strategies import model_parallel
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from engine.errors import CheckpointError
from lightning_compress.trainer.folders import CheckedReader, checked_folders
from tests.engine.files.test_folders import STATE, Code, metadata, of_parts, save, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # a single process


def empty() -> dict[str, Any]:
    """A state to load into: tensors of zeros, and no values."""
    group = {"lr": 0.0, "betas": (0.0, 0.0), "params": []}
    optimizer = {"state": {"a.weight": {"step": torch.tensor(0.0)}}, "param_groups": [group]}
    return {"state_dict": {n: torch.zeros_like(t) for n, t in STATE["state_dict"].items()}, "optimizer_0": optimizer}


def loaded(folder: Path) -> dict[str, Any]:
    """What torch loads through our reader, by the function in whose place Lightning calls ours."""
    state = empty()
    with checked_folders():
        model_parallel._distributed_checkpoint_load(state, folder)
    return state


def test_as_torch_loads(tmp_path: Path) -> None:
    """Tensors and values are those that torch's own reader gives."""
    folder, expected = save(tmp_path / "a"), empty()
    own = model_parallel._distributed_checkpoint_load
    dcp.load(expected, checkpoint_id=folder)
    state = loaded(folder)
    assert model_parallel._distributed_checkpoint_load is own
    assert all(torch.equal(value, STATE["state_dict"][name]) for name, value in state["state_dict"].items())
    assert state["optimizer_0"] == expected["optimizer_0"] and state["optimizer_0"]["param_groups"][0]["lr"] == 0.1


def test_parts(tmp_path: Path) -> None:
    """Torch asks for parts of what processes wrote."""
    whole = torch.randn(5, 4).double()
    state = {"model": {"w": torch.zeros(5, 4).double()}}
    dcp.load(
        state, storage_reader=CheckedReader(of_parts(tmp_path / "a", {(0, 0): whole[:3], (3, 0): whole[3:]}, (5, 4)))
    )
    assert torch.equal(state["model"]["w"], whole)


def test_no_code_runs(tmp_path: Path) -> None:
    """Neither in the index nor in a value, which torch unpickles freely both."""
    folder, ran = save(tmp_path / "a"), tmp_path / "ran"
    index, data = metadata(folder), saved([Code(ran)])
    (folder / "evil").write_bytes(data)
    for key in index.storage_data:
        if key.fqn == "optimizer_0.param_groups.0.lr":
            index.storage_data[key] = _StorageInfo("evil", 0, len(data))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointException, match="evil cannot be read"):
        loaded(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Code(ran)))
    with pytest.raises(CheckpointError, match=r"\.mkdir, which does not belong in an index"):
        loaded(folder)
    assert not ran.exists()
    with pytest.raises(CheckpointException):
        dcp.load(empty(), checkpoint_id=folder)
    assert ran.exists()  # what torch does
