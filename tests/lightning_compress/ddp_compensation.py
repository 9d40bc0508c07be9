"""Fits with compensation and distillation on two CPU processes; each writes its weights after each step.

Started by test_compensation.py: ``python ddp_compensation.py FOLDER METHOD...``; each fit has a folder of its own.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from torch.utils.data import DataLoader

from lightning_compress import ChannelPruning, Compensation, Distillation, ModelCompaction
from tests.lightning_compress.models import Wrapped, data, seeded, trainer, use_one_thread


class Shuffled(Wrapped):
    """Another part of the data on each process."""

    def train_dataloader(self) -> DataLoader:
        """Lightning gives it a distributed sampler."""
        return DataLoader(data(48).dataset, batch_size=4, shuffle=True)


class Writing(Callback):
    """Writes the weights after each step, and what compensation says."""

    def __init__(self, folder: Path, compensation: Compensation) -> None:
        self.folder, self.compensation = folder, compensation
        self.steps: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep; what was pruned at the start of the epoch is compensated by now."""
        self.steps.append({name: value.clone() for name, value in pl_module.named_parameters()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write."""
        report = self.compensation.report
        rows = {name: (row.before, row.after) for name, row in (report or {}).items()}
        extra = float(trainer.callback_metrics["distillation_loss"])
        content = {"extra": extra, "steps": self.steps, "statistics": dict(pl_module.named_buffers()), "rows": rows}
        torch.save(content, self.folder / f"rank{trainer.global_rank}.pt")


def run(folder: Path, method: str) -> None:
    """Fit once."""
    folder.mkdir()
    compensation = Compensation(samples=16, method=method)
    callbacks = [
        compensation,
        ChannelPruning(amount=0.5, schedule="linear", end=2),
        Distillation(weight=0.5, layers=["wide"]),
        ModelCompaction(when=1, confidence=1, on_failure="raise"),
        Writing(folder, compensation),
    ]
    trainer(folder, *callbacks, devices=2, strategy="ddp_fork").fit(seeded(Shuffled))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    use_one_thread()
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]) / name, name)
