"""Runs that are killed at any moment and resumed: they end with the weights of the run that was left alone."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks as lightning_callbacks
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loops import _FitLoop
from torch import Tensor, nn

from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, SparseTraining
from tests.lightning_compress.callbacks.test_shrinking import Smooth
from tests.lightning_compress.models import Base, Wrapped, seeded, trainer

EPOCHS = 6
SAVES_MID_EPOCH = hasattr(_FitLoop, "restarted_mid_epoch")


class Seeded(Base):
    """Data, labels and dropout follow from the step alone: Lightning restores neither sampler nor random state."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(Smooth(), nn.Dropout(0.2))

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """On data of this step's own."""
        torch.manual_seed(self.trainer.global_step)
        x, y = torch.randn(8, 3, 8, 8), torch.randint(3, (8,))
        return F.cross_entropy(self.logits(x), y)

    def configure_optimizers(self) -> Any:
        """Adam with a schedule by step."""
        optimizer = torch.optim.Adam(self.parameters(), 0.01, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Save(Callback):
    """Saves after each batch but an epoch's last, and at the end of epochs.

    From checkpoints of the last batch itself, Lightning 2.6 counts epochs wrongly after the second resumption; from
    those of other batches, Lightning 2.4 trains a whole epoch again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        """In the middle."""
        if not trainer.is_last_batch and SAVES_MID_EPOCH:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """At the end; not of the last one: a run that is over is not resumed, so nobody would put averages in."""
        if trainer.current_epoch + 1 < EPOCHS:
            trainer.save_checkpoint(self.path)


def callbacks(kind: str) -> list[Any]:
    """Pruning and compaction at epochs or at any step, by weights, statistics or chance, with an average."""
    example = torch.zeros(2, 3, 8, 8)
    averaging = (
        [lightning_callbacks.EMAWeightAveraging(decay=0.8)]
        if hasattr(lightning_callbacks, "EMAWeightAveraging")
        else []
    )
    kinds: dict[str, list[Any]] = {
        "epochs": [
            ChannelPruning("bn_scale", amount=0.7, schedule="linear", end=4, example_input=example),
            ModelCompaction(when=[2, 4], on_failure="raise", confidence=1, example_input=example),
            MaskConflictRepair(example_input=example),
        ],
        "steps": [
            ModelCompaction(when=0.3, on_failure="raise", confidence=1, example_input=example),
            ChannelPruning(
                "taylor", 0.7, "linear", unit="step", end=14, frequency=2, example_input=example, gather_every=1
            ),
            *averaging,
        ],
        "chance": [
            *averaging,
            ChannelPruning("random", 0.7, "cubic", unit="step", end=14, frequency=3, example_input=example),
            ModelCompaction(when=[1, 2, 3], on_failure="raise", confidence=1, example_input=example),
        ],
    }
    return kinds[kind]


def run(folder: Path, kind: str, options: dict[str, Any]) -> None:
    """Fit from the last checkpoint, if there is one, and write the final weights."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, last = seeded(Seeded), folder / "last.ckpt"
    fitted = trainer(folder, *callbacks(kind), Save(last), max_epochs=EPOCHS, **options)
    fitted.fit(module, ckpt_path=str(last) if last.exists() else None)
    torch.save(module.state_dict(), folder / "writing.pt")
    os.replace(folder / "writing.pt", folder / "final.pt")


def start(folder: Path, kind: str, options: dict[str, Any]) -> Any:
    """`run` in another process, forked from one that has imported all and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=run, args=(folder, kind, options))
    process.start()
    return process


def run_through(folder: Path, kind: str, options: dict[str, Any]) -> None:
    """Let it come to its end."""
    process = start(folder, kind, options)
    process.join()
    assert process.exitcode == 0


def final(folder: Path) -> dict[str, Tensor]:
    """The final weights."""
    return torch.load(folder / "final.pt", weights_only=True)


def uninterrupted(folder: Path, kind: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Final weights and seconds of a run that is left alone."""
    folder.mkdir()
    begin = time.monotonic()
    run_through(folder, kind, options)
    return final(folder), time.monotonic() - begin


def killed(
    folder: Path, kind: str, kills: int, seconds: float, options: dict[str, Any], seed: int
) -> tuple[dict[str, Tensor], set[int]]:
    """Final weights of a run that is killed so many times, at random moments, before it may end; where it resumed."""
    folder.mkdir()
    generator, left, steps = random.Random(seed), kills, set()
    while left:
        if (folder / "last.ckpt").exists():
            steps.add(torch.load(folder / "last.ckpt", weights_only=True)["global_step"])
        begin, process = time.monotonic(), start(folder, kind, options)
        process.join(generator.uniform(0.05, seconds))
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            left -= 1
        else:  # it came to its end before its time: once more from the start
            assert process.exitcode == 0
            seconds = min(seconds, time.monotonic() - begin)
            (folder / "last.ckpt").unlink()
    run_through(folder, kind, options)
    return final(folder), steps


def check(tmp_path: Path, kind: str, kills: int, **options: Any) -> set[int]:
    """Bit for bit the same, and as small as it should be; the steps from which it was resumed."""
    wanted, seconds = uninterrupted(tmp_path / "alone", kind, options)
    found, steps = killed(tmp_path / "killed", kind, kills, seconds / 2, options, seed=kills)
    assert wanted["net.0.wide.weight"].shape[0] == 5
    assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    return steps


@pytest.mark.parametrize("kind", ["epochs", "steps"])
def test_killed_twice_and_resumed(tmp_path: Path, kind: str) -> None:
    """The final weights are those of the run that was left alone, bit for bit."""
    check(tmp_path, kind, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epochs", "steps", "chance"])
def test_killed_twenty_times_and_resumed(tmp_path: Path, kind: str) -> None:
    """The same with twenty kills, at steps all over the run, in the middle of epochs too, and clipping."""
    steps = check(tmp_path, kind, kills=20, gradient_clip_val=0.5)
    assert len(steps) >= 4
    assert any(step % 3 for step in steps) == SAVES_MID_EPOCH


class SaveEach(Callback):
    """Saves each epoch under its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Under the number of the epoch."""
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"amount": {"wide": 1.0}},
        {"layers": ["wide"], "exclude": ["stem"], "max_amount": {"wide": 1.0}, "widths": {"wide": [1, 8, 16]}},
        {"layers": ["wide"], "criterion": "taylor", "gather_every": 1},
    ],
    ids=["all layers", "amount by pattern", "patterns", "gradients"],
)
def test_layers_that_lost_all_channels_but_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    """They are no group any more: neither the next pruning in the fit nor a resumed fit takes their names for wrong."""

    def run(ckpt_path: Path | None = None) -> Any:
        sparse = SparseTraining("bn_scale", 0.01, layers="wide")
        pruning = ChannelPruning(**{"amount": 1.0, **settings}, schedule=[0.97, 0.98, 1.0], start=1, end=4)
        compaction = ModelCompaction(when=[2, 3, 4], on_failure="raise", confidence=1, save=False)
        module, repair = seeded(Wrapped), MaskConflictRepair()
        every = [sparse, pruning, compaction, repair, SaveEach(tmp_path)]
        torch.manual_seed(0)
        trainer(tmp_path, *every, max_epochs=7).fit(module, ckpt_path=ckpt_path)
        return module

    module = run()
    assert module.net.wide.out_channels == 1
    for epoch in (2, 5):
        resumed = run(tmp_path / f"{epoch}.ckpt")
        assert [p.shape for p in resumed.parameters()] == [p.shape for p in module.parameters()]
