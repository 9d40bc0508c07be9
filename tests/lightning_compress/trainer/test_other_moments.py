"""Other moments at which a step is recorded."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import LightningModule, Trainer

from lightning_compress.trainer.other_moments import OtherMoments


class Steps(LightningModule):
    """Steps that ask for nothing, for the number of the batch, and for what the Trainer counts."""

    def __init__(self, warmup: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the batch."""
        return batch

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Read the number in a function inside."""
        return [row for row in batch if batch_idx]


class Counting(Steps):
    """Compares the numbers of the epoch and of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Begin late."""
        return batch if self.current_epoch < self.hparams.warmup else self._other(batch)

    def _other(self, batch: Any) -> Any:
        return [batch] * (self.global_step % 30 == 29)


def _labels(module: LightningModule, name: str, epoch: int = 0) -> list[str]:
    return list(OtherMoments(module, name, (None, 0), {"epoch": epoch}))


def test_who_does_not_ask_runs_once() -> None:
    """Nothing is recorded twice without a reason."""
    assert _labels(Steps(), "validation_step") == []


def test_the_number_of_the_batch() -> None:
    """It may be read in a comprehension."""
    assert _labels(Steps(), "test_step") == ["batch 1", "batch 1000000"]


def test_numbers_in_code_and_in_hyperparameters() -> None:
    """And those next to them, in turns; the present one is not another."""
    labels = _labels(Counting(), "training_step")
    assert {"epoch 1", "epoch 6", "epoch 7", "epoch 8", "step 28", "step 29", "step 30", "step 1000000"} < set(labels)
    assert labels[:4] == ["epoch 1", "step 1", "epoch 6", "step 6"] and len(labels) <= 24
    assert "epoch 7" not in _labels(Counting(), "training_step", epoch=7)


def test_arguments() -> None:
    """The batch stays; what the Trainer counts is given by name."""
    moments = OtherMoments(Counting(), "training_step", ("batch", 0))
    assert moments["epoch 7"] == (("batch", 0), {"epoch": 7}) and moments["step 29"] == (("batch", 0), {"step": 29})
    assert OtherMoments(Steps(), "test_step", ("batch", 0, 1))["batch 1"] == (("batch", 1, 1), {})


def test_a_fit_that_ends_has_no_later_moments() -> None:
    """Images that grow with the epoch would not fit into memory in the millionth one."""
    module = Counting()
    module.trainer = Trainer(max_epochs=40, max_steps=-1, accelerator="cpu", logger=False)
    labels = _labels(module, "training_step")
    assert "epoch 39" in labels and "step 1000000" in labels
    assert "epoch 1000000" not in labels
