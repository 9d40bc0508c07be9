"""A fit on two CPU processes, then on one; each writes what was gathered. Started by test_evidence.py."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_compress import ChannelPruning
from tests.lightning_compress.models import Wrapped, data, trainer, use_one_thread


class Halves(Wrapped):
    """Eight images a step, on however many processes; without norms, whose statistics are those of half a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.norm = self.net.wide_norm = nn.Identity()

    def train_dataloader(self) -> Any:
        """The images in their order."""
        images, spread = data().dataset, torch.distributed.is_initialized()
        sampler = DistributedSampler(images, shuffle=False) if spread else None
        return DataLoader(images, batch_size=4 if spread else 8, sampler=sampler)


class Writing(Callback):
    """Writes what was gathered, per process."""

    def __init__(self, folder: Path, pruning: ChannelPruning) -> None:
        self.folder, self.pruning = folder, pruning

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Write."""
        state = self.pruning.state_dict()["gathered"]
        torch.save(state, self.folder / f"{trainer.world_size}.{trainer.global_rank}.pt")


def run(folder: Path, **options: Any) -> None:
    """One epoch, in which everything is gathered and nothing pruned."""
    torch.manual_seed(0)
    pruning = ChannelPruning(["apoz", "taylor"], gather_every=1, end=3)
    callbacks = [pruning, Writing(folder, pruning)]
    trainer(folder, *callbacks, max_epochs=1, precision="64-true", **options).fit(Halves())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    use_one_thread()
    # The processes are forked before anything was differentiated in this one.
    run(Path(sys.argv[1]), devices=2, strategy="ddp_fork", use_distributed_sampler=False)
    run(Path(sys.argv[1]))
