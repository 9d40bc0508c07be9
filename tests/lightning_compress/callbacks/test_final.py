"""Tests of the best checkpoint at final sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from lightning_compress import ChannelPruning, FinalMetric, ModelCompaction, compact_checkpoint
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Wrapped, data, seeded, trainer


class Worsening(Wrapped):
    """A validation loss that is best at first, as the unpruned model's is, and a score that does the opposite."""

    losses = (1.0, 2.0, 9.0, 7.0, 8.0, 8.0, 8.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log."""
        self.log("val_loss", torch.tensor(self.losses[self.current_epoch]))
        self.log("val_score", torch.tensor(-self.losses[self.current_epoch]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log a training metric too."""
        self.log("train_loss", torch.tensor(self.losses[self.current_epoch]), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        """One batch."""
        return data(8)


class WithTest(Worsening):
    """Tests what it computes."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log."""
        self.log("test_loss", super(Worsening, self).training_step(batch, batch_idx))

    def test_dataloader(self) -> Any:
        """One batch."""
        return data(8)


def best(folder: Path, monitor: str, mode: str, final: bool, **options: Any) -> dict[str, Any]:
    """The best checkpoint of five epochs, in which pruning is done at the start of the third."""
    metric = FinalMetric(monitor, mode)
    saver = ModelCheckpoint(dirpath=folder, monitor=metric.name if final else monitor, mode=mode, filename="{epoch}")
    pruning = ChannelPruning(amount=0.5, end=2)
    settings = {"max_epochs": 5, "limit_val_batches": 1, "enable_checkpointing": True, **options}
    trainer(folder, saver, metric, pruning, **settings).fit(seeded(Worsening))
    return torch.load(saver.best_model_path, weights_only=True)


@pytest.mark.parametrize(("monitor", "mode"), [("val_loss", "min"), ("val_score", "max"), ("train_loss", "min")])
def test_the_best_is_at_final_sparsity(tmp_path: Path, monitor: str, mode: str) -> None:
    """Without it the first epoch wins; with it the best of those in which all is masked, whatever the order."""
    assert best(tmp_path / "plain", monitor, mode, final=False)["epoch"] == 0
    found = best(tmp_path / "final", monitor, mode, final=True)
    assert found["epoch"] == 3
    weight = found["state_dict"]["net.wide.weight"]
    assert int((weight.flatten(1) == 0).all(1).sum()) == 8
    assert len(list((tmp_path / "final").glob("*.ckpt"))) == 1  # what was saved before is gone


def test_validation_in_the_middle_of_epochs_and_before(tmp_path: Path) -> None:
    """Sanity checks count for nothing; a validation in the middle of the last pruning epoch does not either."""
    options = {"num_sanity_val_steps": 1, "val_check_interval": 1}
    assert best(tmp_path, "val_loss", "min", final=True, **options)["epoch"] == 3


@pytest.mark.parametrize("given", [None, "max"])
def test_the_mode_is_that_of_who_monitors_it(tmp_path: Path, given: str | None) -> None:
    """Higher is better where the checkpoint says so; who says otherwise is named before the fit."""
    metric, saver = FinalMetric("val_score", given), ModelCheckpoint(tmp_path, monitor="val_score_final", mode="max")
    watched = [saver, metric, ChannelPruning(amount=0.5, end=2)]
    settings = {"max_epochs": 5, "limit_val_batches": 1, "enable_checkpointing": True}
    trainer(tmp_path, *watched, **settings).fit(seeded(Worsening))
    assert torch.load(saver.best_model_path, weights_only=True)["epoch"] == 3
    with pytest.raises(MisconfigurationException, match="'val_score' better.*FinalMetric 'min', ModelCheckpoint 'max'"):
        trainer(tmp_path, FinalMetric("val_score", "min"), *watched[::2], **settings).fit(seeded(Worsening))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("patience", [1, 2])
def test_patience_counts_from_final_sparsity(tmp_path: Path, first: bool, patience: int) -> None:
    """The fit is not stopped while channels are masked; an infinite value would stop it, which is said before."""
    stopping = EarlyStopping("val_loss_final", patience=patience, check_finite=False)
    callbacks = [FinalMetric("val_loss"), stopping, ChannelPruning(amount=0.5, end=2)][:: 1 if first else -1]
    settings = {"max_epochs": 9, "limit_val_batches": 1}
    done = trainer(tmp_path, *callbacks, **settings)
    done.fit(seeded(Worsening))
    assert done.current_epoch == 4 + patience  # the best is that of epoch 3
    with pytest.raises(MisconfigurationException, match="`EarlyStopping` would stop .*check_finite=False"):
        trainer(tmp_path, FinalMetric("val_loss"), EarlyStopping("val_loss_final"), ChannelPruning(), **settings).fit(
            seeded(Worsening)
        )


def test_the_small_network_of_the_best_epoch(tmp_path: Path) -> None:
    """The best file is masked and large; `compact_checkpoint` makes the small one that it is tested with."""
    metric, compaction = FinalMetric("val_loss"), ModelCompaction(on_failure="raise")
    saver = ModelCheckpoint(dirpath=tmp_path, monitor=metric.name, filename="{epoch}")
    module, settings = seeded(WithTest), {"max_epochs": 5, "limit_val_batches": 1, "enable_checkpointing": True}
    callbacks = [saver, metric, ChannelPruning(amount=0.5, end=2), compaction]
    runner = trainer(tmp_path, *callbacks, **settings)
    runner.fit(module)
    assert module.net.wide.out_channels == 8
    with pytest.warns(UserWarning, match="grows back"):
        masked = runner.test(module, ckpt_path="best", verbose=False)
    assert module.net.wide.out_channels == 16
    small = compact_checkpoint(saver.best_model_path, WithTest, tmp_path / "small.ckpt", torch.zeros(2, 3, 8, 8))
    assert small.net.wide.out_channels == 8
    assert trainer(tmp_path).test(small, verbose=False)[0] == pytest.approx(masked[0])


def test_a_metric_that_stays_infinite(tmp_path: Path) -> None:
    """A pruning that ends behind the fit leaves no checkpoint at final sparsity: said before the first epoch."""
    pruning = ChannelPruning(amount=0.5, start=0, end=9)
    with pytest.warns(UserWarning) as caught:
        trainer(tmp_path, FinalMetric("val_loss"), pruning, limit_val_batches=1).fit(seeded(Worsening))
    assert any("is infinite throughout this fit" in str(w.message) and "epoch 9" in str(w.message) for w in caught)


def test_a_metric_that_nothing_logs(tmp_path: Path) -> None:
    """A misspelt name is said at the end of the fit, with those that were logged."""
    with pytest.warns(UserWarning, match=r"FinalMetric\('val_los'\)`: no metric of that name.*Logged: train_loss"):
        trainer(tmp_path, FinalMetric("val_los"), ChannelPruning(amount=0.5, end=1), max_epochs=2).fit(
            seeded(Worsening)
        )


def test_bad_use() -> None:
    """A mode that is none, and a Trainer without a pruning, are errors."""
    with pytest.raises(MisconfigurationException, match="`mode`.*'best'"):
        FinalMetric("val_loss", "best")
    with pytest.raises(MisconfigurationException, match="no `ChannelPruning`"):
        trainer(Path("."), FinalMetric("val_loss")).fit(seeded(Wrapped))
