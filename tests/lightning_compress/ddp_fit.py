"""A fit on two CPU processes; each writes what it holds. Started by test_ddp.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction
from tests.lightning_compress.models import Reference, Wrapped, fit, seeded


def by_rank(group: Any, parameter: Any) -> Tensor:
    """Scores that differ between the ranks, as statistics that nobody reduced do."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.rand(group.size, generator=torch.Generator().manual_seed(rank))


class Keep(Callback):
    """Keeps the masks in force at the end of training."""

    def __init__(self, pruning: ChannelPruning) -> None:
        self.pruning = pruning
        self.masks: Any = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before they are dropped by the compaction."""
        self.masks = self.pruning.masks


def main(folder: Path) -> None:
    """Fit and write."""
    torch.set_num_threads(1)
    pruning, compaction, reference = (
        ChannelPruning(by_rank, amount=0.5),
        ModelCompaction(on_failure="raise"),
        Reference(),
    )
    keep, module = Keep(pruning), seeded(Wrapped)
    callbacks = [compaction, reference, ComplexityMonitor(), keep, pruning, MaskConflictRepair()]
    # The reference has to stand before the compaction, which `fit` orders as given.
    callbacks.sort(key=lambda callback: callback is compaction)
    trainer = fit(module, folder, *callbacks, strategy="ddp", devices=2)
    result = {
        "masks": keep.masks,
        "weights": module.state_dict(),
        "error": reference.error(module),
        "path": compaction.checkpoint_path,
        "verified": compaction.certificate.verified,
    }
    torch.save(result, folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
