"""Tests on two CPU processes with DDP, in its three flavours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_compress import load_compacted
from tests.lightning_compress import ddp_fit

ROOT = Path(__file__).parents[2]
STRATEGIES = ["ddp", "ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=STRATEGIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a fit on two processes wrote what each holds; by its own scores each would choose other channels."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(Path(__file__).with_name("ddp_fit.py")), str(folder), request.param]
    subprocess.run(script, env=environment, cwd=folder, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same fit on one process holds, on the joined batches."""
    folder = tmp_path_factory.mktemp("alone")
    ddp_fit.run(folder, "auto", devices=1)
    return torch.load(folder / "rank0.pt", weights_only=True)


def read(folder: Path, name: str) -> dict[str, Any]:
    """What a process wrote."""
    return torch.load(folder / f"{name}.pt", weights_only=True)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether names, shapes and values are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def single(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float32, which a module has before a Trainer in double precision takes it."""
    return {name: value.float() for name, value in weights.items()}


def test_both_ranks_hold_the_same_after_each_step(folder: Path, alone: dict[str, Any]) -> None:
    """Masks, shapes and weights, bit for bit, through prunings and compactions; and those of one process, rounded."""
    ranks = [read(folder, "rank0"), read(folder, "rank1")]
    assert len(ranks[0]["steps"]) == len(alone["steps"]) == 12
    assert all(same(one, other) for one, other in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True))
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    for here, there in zip([*ranks[0]["steps"], ranks[0]["weights"]], [*alone["steps"], alone["weights"]], strict=True):
        assert here.keys() == there.keys()
        for name, value in here.items():
            torch.testing.assert_close(value, there[name], rtol=1e-9, atol=1e-12)
    widths = [step["net.wide.weight"].shape[0] for step in ranks[0]["steps"]]
    assert widths == [16] * 6 + [8] * 6 and ranks[0]["weights"]["net.wide.weight"].shape[0] == 4
    assert any(name.endswith("mask") and not value.all() for name, value in ranks[0]["steps"][3].items())


def test_rank_zero_decides(folder: Path) -> None:
    """Although the scores differ between the ranks, the channels are those that rank 0 would mask."""
    mask = read(folder, "rank1")["steps"][3]["wide.bias mask"]
    scores = torch.rand(16, generator=torch.Generator().manual_seed(0))
    gone = (~mask).nonzero().flatten().tolist()
    assert gone and set(gone) == set(scores.argsort()[: len(gone)].tolist())


def test_the_process_that_started_it_knows_the_result(folder: Path) -> None:
    """Also where the fit ran in other processes: module, plan, certificate and checkpoint, which loads."""
    rank, main = read(folder, "rank0"), read(folder, "main0" if (folder / "main0.pt").exists() else "main")
    assert same(single(rank["weights"]), single(main["weights"]))
    assert rank["kept"] == main["kept"] and main["verified"] and rank["path"] == main["path"]
    assert same(load_compacted(main["path"], ddp_fit.Joined).state_dict(), single(main["weights"]))


def test_ranks_that_cannot_follow_a_compaction_train_on_with_masks(tmp_path: Path) -> None:
    """One fails: both restore the model, DDP reduces the gradients as before, and the end of the fit compacts."""
    script = [sys.executable, str(Path(__file__).with_name("ddp_refused.py")), str(tmp_path)]
    subprocess.run(script, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True, timeout=120)
    ranks = [read(tmp_path, "rank0"), read(tmp_path, "rank1")]
    assert [step["net.wide.weight"].shape[0] for step in ranks[0]["steps"]] == [16] * 9
    assert all(same(one, other) for one, other in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True))
    assert same(ranks[0]["weights"], ranks[1]["weights"]) and ranks[0]["weights"]["net.wide.weight"].shape[0] == 8
    assert "unchanged: On rank 1: VerificationError: no way to follow" in (tmp_path / "warnings.txt").read_text()
