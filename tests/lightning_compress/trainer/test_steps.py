"""Steps as entries: which there are, on which batch, and what they ask of a Trainer that does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction
from lightning_compress.trainer.steps import EVALUATING, TRAINING, step_entries
from tests.lightning_compress.models import Root, Wrapped, data, fit, seeded, trainer


class Asking(Wrapped):
    """Asks the Trainer for all that a step may ask for, and has two validation loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.hooks: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Run before the step."""
        self.hooks.append("start")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Step, as far as the Trainer knows."""
        optimizer = self.optimizers()
        with self.toggled_optimizer(optimizer):
            loss = self.logits(batch[0]).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0
        self.log_dict({"loss": loss, "epoch": float(self.current_epoch + self.trainer.global_step)})

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
        """Say which loader it is."""
        self.log("which", dataloader_idx)

    def val_dataloader(self) -> list[DataLoader]:
        """Two of them."""
        return [data(8), data(16)]


class Try(Callback):
    """Runs the entries once."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what they are and give."""
        self.entries = step_entries(trainer, pl_module, (TRAINING, *EVALUATING))
        before = [p.clone() for p in pl_module.parameters()]
        self.results = {name: entry.run(entry.args, entry.kwargs) for name, entry in self.entries.items()}
        self.same = all(torch.equal(a, b) for a, b in zip(before, pl_module.parameters(), strict=True))
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.attached = pl_module.trainer is trainer and "log" not in vars(pl_module)
        pl_module.zero_grad()
        pl_module.on_train_batch_start = lambda batch, batch_idx: -1  # the fit itself is over


def test_what_a_step_asks_for_does_nothing(tmp_path: Path) -> None:
    """No weight, rate, or log changes; what is logged is returned, and each loader has an entry."""
    attempt = Try()
    module = Asking()
    fit(module, tmp_path, attempt, max_epochs=1, limit_val_batches=1)
    assert list(attempt.entries) == ["training_step", "validation_step (0)", "validation_step (1)"]
    assert attempt.entries["training_step"].training and not attempt.entries["validation_step (0)"].training
    out, (loss, epoch) = attempt.results["training_step"]
    assert out is None and loss.ndim == 0 and epoch == 0.0
    assert attempt.results["validation_step (1)"] == [None, [1]]
    assert attempt.same and attempt.rate == 0.05 and attempt.attached and module.hooks == ["start"]


class Evaluating(Wrapped):
    """Has loaders for what follows a fit."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log a mean."""
        self.log("mean", self.logits(batch[0]).mean())

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log another."""
        self.log("mean", self.logits(batch[0]).mean())


class Unprepared(LightningDataModule):
    """A data module as the documentation has it: the test set is there once the Trainer tests."""

    def setup(self, stage: str) -> None:
        """Make what the stage needs."""
        if stage == "test":
            self.test = data(8)

    def train_dataloader(self) -> DataLoader:
        """Return batches."""
        return data(8)

    def val_dataloader(self) -> Any:
        """Two loaders, by name."""
        return {"a": data(8), "b": data(16)}

    def test_dataloader(self) -> DataLoader:
        """Return them."""
        return self.test


def test_a_stage_that_is_not_set_up(tmp_path: Path) -> None:
    """Its step is left out, and named; loaders of a mapping are gone through one after the other."""
    attempt = Try()
    with pytest.warns(UserWarning, match="`Unprepared.test_dataloader` cannot be called during the fit"):
        trainer(tmp_path, attempt, max_epochs=1, limit_val_batches=1).fit(Evaluating(), datamodule=Unprepared())
    assert list(attempt.entries) == ["training_step", "validation_step (0)", "validation_step (1)"]


class Denoised(Root):
    """Batches are changed by what the first layer says, on their way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Add the mean of its features."""
        with torch.no_grad():
            return [batch[0] + 0.1 * self.features.stem(batch[0]).mean((1, 2, 3), keepdim=True), batch[1]]


class Turning(LightningDataModule):
    """Changes batches on their way to the device, whatever the module is."""

    def train_dataloader(self) -> DataLoader:
        """The random images."""
        return data()

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Flip images."""
        return [batch[0].flip(-1), *batch[1:]] if self.trainer.training else batch


@pytest.mark.parametrize(("make", "datamodule"), [(Denoised, None), (Root, Turning)])
def test_hooks_that_move_batches_keep_what_they_read(tmp_path: Path, make: Any, datamodule: Any) -> None:
    """And nothing else, whichever methods of Lightning's own name these hooks, too."""
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    compaction = ModelCompaction(when=1, save=False, on_failure="raise", confidence=1)
    module = seeded(make)
    trainer(tmp_path, pruning, MaskConflictRepair(), compaction).fit(module, datamodule=datamodule and datamodule())
    assert (module.features.stem.out_channels, module.features.wide.out_channels) == (4, 8)
    assert compaction.certificate is not None and compaction.certificate.verified
