"""Training goes on after a compaction as it would have with masks: each optimizer with each way to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks as lightning_callbacks
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.plugins import MixedPrecision
from torch.optim import lr_scheduler

from lightning_compress import ModelCompaction
from tests.lightning_compress.callbacks.test_shrinking import OPTIMIZERS, Trained, both, errors, widths
from tests.lightning_compress.models import seeded

DOUBLE: dict[str, Any] = {"precision": "64-true"}
CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.05}
WAYS: dict[str, dict[str, Any]] = {
    "accumulated": {**DOUBLE, "accumulate_grad_batches": 2},
    "clipped by norm": {**DOUBLE, **CLIPPED},
    "clipped by value": {**DOUBLE, "gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"},
    "bf16": {"precision": "bf16-mixed"},
    "bf16, accumulated and clipped": {"precision": "bf16-mixed", "accumulate_grad_batches": 2, **CLIPPED},
    "scaled": {"plugins": lambda: [MixedPrecision("16-mixed", "cpu")]},
}
AVERAGES: dict[str, Callable[[], Any]] = {"swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2)}
if hasattr(lightning_callbacks, "WeightAveraging"):
    AVERAGES["mean"] = lightning_callbacks.WeightAveraging
if hasattr(lightning_callbacks, "EMAWeightAveraging"):
    AVERAGES["ema"] = lambda: lightning_callbacks.EMAWeightAveraging(decay=0.5)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.02, total_steps=12), "interval": "step"},
    "plateau": lambda o: {"scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0), "monitor": "train_loss"},
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.StepLR(o, 1)], [2]
    ),
}


class Scheduled(Trained):
    """Under a schedule of the learning rate, which may read the loss."""

    def __init__(self, optimizer: str, schedule: str) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Cross entropy."""
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """With the schedule."""
        optimizer = OPTIMIZERS[self.hparams.optimizer](self.parameters())
        return [optimizer], [SCHEDULES[self.hparams.schedule](optimizer)]


def check(folder: Path, make: Callable[[], Any], average: str | None = None, **options: Any) -> None:
    """Outputs after each step, and all weights in the end, are those of the masked run."""
    more = [AVERAGES[average]] if average else []
    masked, compacted = both(folder, make, lambda: [callback() for callback in more], **options)
    assert widths(masked[1]) == [16] and widths(compacted[1]) == [16, 8]
    double = options.get("precision") == DOUBLE["precision"]
    assert max(errors(masked[1], compacted[1])) <= (1e-9 if double else torch.finfo(torch.bfloat16).eps)
    if not double:
        return  # a bias in front of a norm has no gradient but rounding, which optimizers blow up: outputs tell more
    plan = next(callback.plan for callback in compacted[2].callbacks if isinstance(callback, ModelCompaction))
    small = dict(compacted[0].net.named_parameters())
    for name, whole in masked[0].net.named_parameters():
        left = plan.slices[name].apply(whole) if name in plan.slices else whole
        assert float((left - small[name]).detach().abs().max() / left.detach().abs().max()) <= 1e-9, name


def allowed(optimizer: str, way: str) -> bool:
    """Lightning refuses to clip what a fused optimizer unscales itself."""
    return "fused" not in optimizer or way != "bf16, accumulated and clipped"


ALL = [(optimizer, way) for optimizer in OPTIMIZERS for way in WAYS if allowed(optimizer, way)]
TURNS = [
    (name, [way for way in WAYS if allowed(name, way)][turn % (len(WAYS) - 1)]) for turn, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("optimizer", "way"), TURNS)
def test_each_optimizer(tmp_path: Path, optimizer: str, way: str) -> None:
    """Each optimizer with one way to train."""
    check(tmp_path, lambda: seeded(Trained, optimizer=optimizer), **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "way"), [case for case in ALL if case not in TURNS])
def test_all_combinations(tmp_path: Path, optimizer: str, way: str) -> None:
    """The whole product."""
    check(tmp_path, lambda: seeded(Trained, optimizer=optimizer), **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averages(tmp_path: Path, optimizer: str, average: str) -> None:
    """The weights that an averaging callback puts in at the end are those of the masked run, too."""
    check(tmp_path, lambda: seeded(Trained, optimizer=optimizer), average, **DOUBLE)


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # by torch itself, in older versions
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_the_learning_rate(tmp_path: Path, schedule: str) -> None:
    """By epoch, by step with cycled momentum, by the loss, and one after another."""
    check(tmp_path, lambda: seeded(Scheduled, optimizer="adam", schedule=schedule), **DOUBLE)
