"""A fit on two CPU processes, one of which cannot write: ``python ddp_disk.py FOLDER RANK``; see test_saving.py."""

from __future__ import annotations

import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback

from engine.errors import CheckpointError
from lightning_compress import ChannelPruning, ModelCompaction
from tests.lightning_compress.models import Wrapped, fit, seeded


class Full(Callback):
    """From the first batch on, one rank can write no file of more than a kilobyte."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the limit of this process."""
        if trainer.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


def main(folder: Path, rank: int) -> None:
    """Fit, and say how it ended."""
    compaction = ModelCompaction(dirpath=folder, on_failure="raise")
    callbacks = [ChannelPruning(amount=0.5), compaction, Full(rank)]
    own = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        fit(seeded(Wrapped), folder, *callbacks, strategy="ddp", devices=2)
    except CheckpointError as error:
        print(f"\nrank {own}: {error}", flush=True)
    else:
        print(f"\nrank {own}: {compaction.checkpoint_path}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]))
