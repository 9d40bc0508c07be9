"""Metrics of an epoch, which the Trainer computes when they are asked for: not while a model is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction
from tests.lightning_compress.models import Wrapped, data


class Logging(Wrapped):
    """Logs the mean of an epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log the loss of the step and of the epoch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log a loss of the same kind."""
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    train_dataloader = val_dataloader = lambda self: data()


class Reading(Callback):
    """Reads what was logged, as a message at the end of an epoch does."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss of the epoch; a step that is recorded reads it as well."""
        self.losses.append(float(trainer.callback_metrics["loss_epoch"]))


def _callbacks(when: int | None, unit: str) -> list[Callback]:
    pruning = ChannelPruning("l1", amount=0.5, start=0, end=1, unit=unit)
    compaction = ModelCompaction(save=False) if when is None else ModelCompaction(save=False, when=when)
    return [pruning, MaskConflictRepair(), ComplexityMonitor(), compaction]


@pytest.mark.parametrize(("when", "unit"), [(None, "epoch"), (2, "epoch"), (None, "step")])
def test_a_loss_of_the_epoch(tmp_path: Path, when: int | None, unit: str) -> None:
    """The logger, a stop and a checkpoint by it get numbers, as without these callbacks."""
    reading = Reading()
    others: list[Any] = [EarlyStopping("loss_epoch"), ModelCheckpoint(tmp_path / "best", monitor="loss_epoch"), reading]
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", logger=CSVLogger(tmp_path), log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[*_callbacks(when, unit), *others],
    )  # fmt: skip
    trainer.fit(Logging())
    assert type(trainer.callback_metrics["loss_epoch"]) is Tensor and torch.isfinite(torch.tensor(reading.losses)).all()
    assert Path(others[1].best_model_path).is_file()
