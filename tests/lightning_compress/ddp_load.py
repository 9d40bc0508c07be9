"""Fits on two CPU processes, then loads what came of it in every stage; each process writes what it puts out.

Started by test_ways_of_loading.py: ``python ddp_load.py FOLDER STRATEGY``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.lightning_compress.models import trainer, use_one_thread
from tests.lightning_compress.shipped import NETWORKS, Made, Mixed


def stages(strategy: str, kind: str) -> tuple[str, ...]:
    """The stages to load in. Each takes new processes under ``ddp_spawn``, which take long: there one is tried."""
    if strategy == "ddp_spawn":
        return ("test",) if kind == "cnn" else ()
    return ("test", "validate", "predict", "fit")


def run(folder: Path, strategy: str, kind: str) -> None:
    """Fit and compact on two processes; test, validate, predict and fit on from the checkpoint on two."""
    options = {"strategy": strategy, "devices": 2}
    own = folder / kind
    own.mkdir(exist_ok=True)
    made = Made(Mixed, kind, own, report=str(folder / kind), **options)
    rank = os.environ.get("LOCAL_RANK", "0")
    torch.save(made.module.outputs(), folder / f"{kind}-main-{rank}.pt")
    for stage in stages(strategy, kind):
        module = Mixed(kind)
        module.report = "" if stage == "fit" else str(folder / kind)
        runner = trainer(own, max_epochs=2, limit_val_batches=1, **options)
        getattr(runner, stage)(module, ckpt_path=made.path)
        if stage == "fit":
            torch.save(module.outputs(), folder / f"{kind}-again-{rank}.pt")


if __name__ == "__main__":
    use_one_thread()
    for name in NETWORKS:
        run(Path(sys.argv[1]), sys.argv[2], name)
