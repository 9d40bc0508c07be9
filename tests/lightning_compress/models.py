"""Tiny networks, data and Trainers for the tests of the callbacks."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def use_one_thread() -> None:
    """Compute in one thread, in forked processes too.

    After a fork, torch replaces its pool of threads at the first use. Where two threads use it first at once, one may
    find none, and the process aborts ("Invalid thread pool!"). Here it is used before there are any.
    """
    one = functools.partial(torch.set_num_threads, 1)
    one()
    os.register_at_fork(after_in_child=one)


class Net(nn.Module):
    """A stem, one residual block with batch norms, and a linear layer: two prunable groups and the output."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.wide = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.wide_norm = nn.BatchNorm2d(2 * width)
        self.back = nn.Conv2d(2 * width, width, 3, padding=1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.back(F.relu(self.wide_norm(self.wide(x)))))
        return self.fc(x.mean((2, 3)))


class OnDemand(nn.Module):
    """Returns features instead of logits to those who ask for them, as Ultralytics' detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, embed: list[int] | None = None) -> Tensor:
        """Logits of images, or some of the features."""
        features = self.stem(x).relu().mean((2, 3))
        if embed is not None:
            return features[:, embed]
        return self.head(features)  # type: ignore[no-any-return]


def data(n: int = 24, batch: int = 8) -> DataLoader:
    """Random 8×8 images with labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(3, (n,), generator=generator)), batch_size=batch)


class Base(LightningModule):
    """Training with momentum and weight decay, which revive zeros."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A value to monitor that never improves."""
        self.log("val_loss", torch.tensor(1.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=0.01)

    def train_dataloader(self) -> DataLoader:
        """The random images."""
        return data()

    def val_dataloader(self) -> DataLoader:
        """The random images."""
        return data(8)


class Wrapped(Base):
    """The model is an attribute, next to a metric and a loss, and `forward` is not overridden."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(width)
        self.accuracy = MulticlassAccuracy(3)
        self.loss = nn.CrossEntropyLoss()

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self.net(x)


class Root(Base):
    """The LightningModule is the model."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.features = Net(width)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.features(x)

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self(x)


class Reference(Callback):
    """Randomises the batch norms' statistics when training ends, and keeps the masked weights for comparison."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.masks: dict[str, dict[str, Tensor]] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Randomise."""
        generator = torch.Generator().manual_seed(1)
        for module in pl_module.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
                module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights; this callback has to stand before the compaction."""
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.masks = next((dict(c.masks) for c in trainer.callbacks if type(c).__name__ == "ChannelPruning"), {})

    def error(self, module: Base) -> float:
        """Largest difference of the outputs of ``module`` and of the masked model, relative to the largest output."""
        masked = type(module)(**module.hparams)
        masked = masked.to(next(iter(self.weights.values())).dtype)
        masked.load_state_dict(self.weights)
        return difference(masked, module)


def difference(one: Base, other: Base) -> float:
    """Largest relative difference of two modules' outputs in eval mode, at two batch sizes and resolutions."""
    errors = []
    for shape in ((2, 3, 8, 8), (5, 3, 11, 7)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(next(one.parameters()))
        with torch.no_grad():
            left, right = one.eval().logits(x), other.eval().to(x).logits(x)
        errors.append(((left - right).abs().max() / left.abs().max()).item())
    return max(errors)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    """A quiet Trainer on the CPU: three epochs of three steps."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": str(folder),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 3,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(module: Base, folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    """Fit and return the Trainer."""
    torch.manual_seed(0)
    result = trainer(folder, *callbacks, **options)
    result.fit(module)
    return result


def seeded(cls: type[Base], **options: Any) -> Base:
    """A module whose weights do not depend on what ran before."""
    torch.manual_seed(0)
    return cls(**options)
