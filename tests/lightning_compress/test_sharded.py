"""Fits whose parameters are spread over two CPU processes by FSDP2, against the same fits in one process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_compress import load_compacted
from tests.lightning_compress import sharded_fit

ROOT = Path(__file__).parents[2]
# What is equal in exact arithmetic differs by the order of the sums of gradients over samples.
LIMIT = 1e-9
FITS = [("decoder", "sgd"), ("decoder", "adamw"), ("encoder", "adam"), ("encoder", "adamw"), ("cnn", "sgd")]
SLOW = [pytest.param(*names, marks=pytest.mark.slow) for names in FITS[2:]]


def launch(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the fit in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(Path(__file__).with_name("sharded_fit.py")), str(folder), *arguments]
    return subprocess.run(script, env=environment, cwd=folder, check=check, timeout=170, capture_output=True, text=True)


def read(folder: Path, name: str) -> dict[str, Any]:
    """What a process wrote."""
    return torch.load(folder / f"{name}.pt", weights_only=True)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of tensors of the same names and shapes."""
    assert one.keys() == other.keys() and all(one[name].shape == other[name].shape for name in one)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder that a fit on two processes wrote to; each fit is run once."""

    @functools.cache
    def folder(model: str, optimizer: str) -> Path:
        path = tmp_path_factory.mktemp(f"{model}-{optimizer}")
        launch(path, model, optimizer, "2")
        return path

    return folder


@pytest.mark.parametrize(("model", "optimizer"), [*FITS[:2], *SLOW])
def test_sharded_as_in_one_process(
    model: str, optimizer: str, sharded: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Masks, shapes, weights after each step, optimizers' states and the checkpoint, and no rank is another."""
    folder, alone = sharded(model, optimizer), tmp_path
    sharded_fit.run(alone, model, optimizer, devices=1)
    ranks, one = [read(folder, "rank0"), read(folder, "rank1")], read(alone, "rank0")
    assert len(ranks[0]["steps"]) == len(one["steps"]) == 12
    for steps in zip(*([*fit["steps"], fit["weights"]] for fit in (*ranks, one)), strict=True):
        assert difference(steps[0], steps[1]) == 0
        assert difference(steps[0], steps[2]) < LIMIT
    sizes = [sum(t.numel() for name, t in step.items() if "mask" not in name) for step in ranks[0]["steps"]]
    assert sizes[0] > sizes[-1] > sum(t.numel() for t in ranks[0]["weights"].values())
    states = zip(ranks[0]["states"], one["states"], strict=True)
    assert max(float((a - b).abs().max()) for a, b in states) < LIMIT
    assert ranks[0]["kept"] == one["kept"] and ranks[0]["certificate"]["verified"]
    small = load_compacted(ranks[0]["path"], sharded_fit.Spread, spread=False)
    assert difference(dict(small.state_dict()), ranks[0]["weights"]) == 0


def test_folders_load_and_resume_on_one_process(sharded: Callable[[str, str], Path], tmp_path: Path) -> None:
    """A checkpoint of `torch.distributed.checkpoint` from the middle, after a compaction, optimizer included."""
    folder = sharded("decoder", "adamw")
    whole = read(folder, "rank0")
    small = load_compacted(folder / "middle.ckpt", sharded_fit.Spread, spread=False)
    weights = {name: value for name, value in whole["steps"][8].items() if "mask" not in name}
    assert difference(dict(small.state_dict()), weights) == 0
    launch(tmp_path, "decoder", "adamw", "1", str(folder / "middle.ckpt"))
    resumed = read(tmp_path, "rank0")
    assert len(resumed["steps"]) == 3 and resumed["certificate"]["verified"]
    for here, there in zip(resumed["steps"], whole["steps"][9:], strict=True):
        assert difference(here, there) < LIMIT
    assert difference(resumed["weights"], whole["weights"]) < LIMIT
