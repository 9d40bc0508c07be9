"""Tests on two CPU processes with DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_compress import load_compacted
from lightning_compress.masking import same
from tests.lightning_compress.models import Wrapped

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks hold after one fit, in which each would choose other channels."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ddp_fit.py")), str(folder)],
        env=environment,
        cwd=folder,
        check=True,
        timeout=300,
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_masks_are_equal_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    """Although the scores differ between the ranks, the masks are rank 0's on both."""
    assert ranks[0]["masks"] and same(ranks[0]["masks"], ranks[1]["masks"])
    mask = ranks[0]["masks"]["wide"]["bias"]
    scores = torch.rand(16, generator=torch.Generator().manual_seed(0))
    assert set((~mask).nonzero().flatten().tolist()) == set(scores.argsort()[:8].tolist())


def test_both_ranks_compact_alike(ranks: list[dict[str, Any]]) -> None:
    """Both ranks end with the same small weights, bit for bit, that compute what the masked model did."""
    one, other = (rank["weights"] for rank in ranks)
    assert one["net.wide.weight"].shape == (8, 4, 3, 3)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert all(rank["error"] <= 1e-4 and rank["verified"] for rank in ranks)


def test_checkpoint_loads(ranks: list[dict[str, Any]]) -> None:
    """Both ranks know the one checkpoint, and it loads to their weights."""
    assert ranks[0]["path"] == ranks[1]["path"]
    loaded = load_compacted(ranks[0]["path"], Wrapped).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in ranks[1]["weights"].items())
