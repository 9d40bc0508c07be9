"""One network of each kind, small, as LightningModules that remember what they put out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from engine.program.trees import tensors_in
from lightning_compress import ChannelPruning, Compactable, MaskConflictRepair, ModelCompaction
from tests.engine import golden
from tests.engine.detectors import detector
from tests.lightning_compress.models import Reference, trainer


def convolutional() -> nn.Module:
    """Grouped, depthwise and normed convolutions."""
    return nn.Sequential(*golden.convolutional(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def transformer() -> nn.Module:
    """Attention with sizes written in Python, torch's own, and norms over the stream."""
    return nn.Sequential(nn.Linear(5, 8), golden.HandAttention(), *golden.encoder()[1:])


class Recurrent(nn.Module):
    """Convolution over time, an LSTM in both directions, and a head with a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.lstm = nn.Conv1d(5, 8, 3, padding=1), nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return a number per step, of (batch, steps, features)."""
        return self.head(self.lstm(torch.relu(self.front(x.transpose(1, 2))).transpose(1, 2))[0])


NETWORKS = {"cnn": convolutional, "detector": detector, "transformer": transformer, "rnn": Recurrent}


def example(kind: str) -> Any:
    """Return what the network takes, as positional arguments."""
    generator = torch.Generator().manual_seed(3)
    if kind == "detector":
        return ([torch.rand(3, 32, 32, generator=generator) for _ in range(2)],)
    return (torch.rand(4, *((2, 6, 6) if kind == "cnn" else (4, 5)), generator=generator),)


class Ship(LightningModule):
    """Trains one of the networks; each pass over the example is remembered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = NETWORKS[kind]()
        self.seen: list[Tensor] = []
        self.report = ""

    def outputs(self) -> list[Tensor]:
        """Return what the network puts out for the example, in eval mode."""
        with torch.no_grad():
            return list(tensors_in(self.net.eval()(*example(self.hparams["kind"]))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Make the outputs small; of a detector, its own losses, which sample."""
        torch.manual_seed(batch_idx)
        args = example(self.hparams["kind"])
        if self.hparams["kind"] == "detector":
            box = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 20.0]]), "labels": torch.ones(1, dtype=torch.int64)}
            return sum(self.net(*args, [box] * len(args[0])).values())
        return self.net(*args).square().mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Remember."""
        self.seen = self.outputs()
        self.write(self.trainer.state.fn.value)

    validation_step = test_step

    def predict_step(self, batch: Any, batch_idx: int) -> list[Tensor]:
        """Return what is remembered."""
        self.test_step(batch, batch_idx)
        return self.seen

    def on_fit_end(self) -> None:
        """Callbacks have compacted by now."""
        self.write("fit")

    def write(self, stage: str) -> None:
        """Write what the network puts out, for other processes to read."""
        if self.report:
            torch.save(self.outputs(), f"{self.report}-{stage}-{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with its state."""
        return torch.optim.Adam(self.parameters(), 1e-2)

    def train_dataloader(self) -> DataLoader:
        """Four steps; the numbers mean nothing."""
        return DataLoader(range(4), batch_size=2)

    test_dataloader = val_dataloader = predict_dataloader = train_dataloader


class Mixed(Compactable, Ship):
    """The same with the mixin."""


class Made:
    """A compacted module and what was written of it."""

    def __init__(self, cls: type[Ship], kind: str, folder: Path, report: str = "", **options: Any) -> None:
        self.kind, self.folder, given = kind, folder, {"example_input": example(kind)}
        self.compaction = ModelCompaction(on_failure="raise", save_weights_only=False, **given)
        saver = ModelCheckpoint(folder, filename="best")
        callbacks = [ChannelPruning(amount=0.5, **given), MaskConflictRepair(**given), Reference()]
        self.module = cls(kind)
        self.module.report = report
        self.trainer = trainer(
            folder, *callbacks, self.compaction, saver, **{"enable_checkpointing": True, "max_epochs": 2, **options}
        )
        self.trainer.fit(self.module)
        self.path, self.best = self.compaction.checkpoint_path, folder / "best.ckpt"


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all outputs are the same, bit for bit, and there are some."""
    return len(one) == len(other) > 0 and all(
        a.numel() > 0 and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )
