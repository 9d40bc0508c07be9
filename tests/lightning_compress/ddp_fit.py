"""A fit on two CPU processes; each writes what it holds after each step, and so does the one that stays behind.

Started by test_ddp.py: ``python ddp_fit.py FOLDER STRATEGY``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, DistributedSampler

from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction
from lightning_compress.trainer.quiet import is_quiet
from tests.lightning_compress.models import Base, data, fit, seeded, use_one_thread


def by_rank(group: Any, parameter: Any) -> Tensor:
    """Scores that differ between the ranks, as statistics that nobody reduced do."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.rand(group.size, generator=torch.Generator().manual_seed(rank))


class SyncedNorm(nn.BatchNorm2d):
    """What torch's own synchronised batch norm does on CUDA; it refuses the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """With the statistics of all ranks' samples while training."""
        if not self.training:
            return super().forward(x)
        ranks = torch.distributed.get_world_size()
        mean = all_reduce(x.mean((0, 2, 3))) / ranks
        variance = all_reduce(x.square().mean((0, 2, 3))) / ranks - mean.square()
        count = ranks * x.numel() / x.shape[1]
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight / (variance + self.eps).sqrt()
        return (x - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class Synced(LayerSync):
    """Puts synchronised norms in place of batch norms, and plain ones back at the end, as Lightning does."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Other modules, with the same parameters and buffers."""
        return exchanged(model, nn.BatchNorm2d, SyncedNorm)

    def revert(self, model: nn.Module) -> nn.Module:
        """And back."""
        return exchanged(model, SyncedNorm, nn.BatchNorm2d)


def exchanged(model: nn.Module, old: type, new: type) -> nn.Module:
    """The model with other modules for those of a class."""
    for name, module in list(model.named_modules()):
        if type(module) is old:
            other = new(module.num_features)
            other.__dict__.update(module.__dict__)
            model.set_submodule(name, other)
    return model


class Smooth(nn.Module):
    """Residual, with batch norms and no kinks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.wide_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(16)
        self.back, self.fc = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = torch.tanh(self.norm(self.stem(x)))
        return self.fc(torch.tanh(x + self.back(torch.tanh(self.wide_norm(self.wide(x))))).mean((2, 3)))


class Joined(Base):
    """Eight images a step, on however many processes."""

    def __init__(self, batch: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Smooth()

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self.net(x)

    def train_dataloader(self) -> DataLoader:
        """The random images in their order: Lightning's own sampler would shuffle them."""
        images = data().dataset
        spread = torch.distributed.is_initialized()
        sampler = DistributedSampler(images, shuffle=False) if spread else None
        return DataLoader(images, batch_size=self.hparams.batch, sampler=sampler)


class Record(Callback):
    """Keeps weights and masks after each step, and writes them when the fit is over."""

    def __init__(self, folder: Path, pruning: ChannelPruning, compaction: ModelCompaction) -> None:
        self.folder, self.pruning, self.compaction = folder, pruning, compaction
        self.steps: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Keep; not while steps are recorded, or all that is kept would have to stay whole."""
        if is_quiet(pl_module):
            return
        masks = {f"{m}.{n} mask": mask for m, own in self.pruning.masks.items() for n, mask in own.items()}
        self.steps.append({k: v.clone() for k, v in (pl_module.state_dict() | masks).items()})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write."""
        write(self.folder / f"rank{trainer.global_rank}.pt", pl_module, self.compaction, self.steps)


def write(path: Path, module: LightningModule, compaction: ModelCompaction, steps: list[dict[str, Tensor]]) -> None:
    """What a process holds at the end."""
    result = {
        "steps": steps,
        "weights": dict(module.state_dict()),
        "path": compaction.checkpoint_path,
        "verified": compaction.certificate.verified,
        "kept": {name: cut.shape for name, cut in compaction.plan.slices.items()},
    }
    torch.save(result, path)


def run(folder: Path, strategy: str, devices: int) -> None:
    """Fit, pruning in three epochs, compacting in the third and at the end."""
    use_one_thread()
    pruning = ChannelPruning(by_rank, amount=0.75, schedule="linear", start=0, end=3)
    compaction = ModelCompaction(when=2, on_failure="raise")
    module = seeded(Joined, batch=8 // devices)
    record = Record(folder, pruning, compaction)
    callbacks = [compaction, ComplexityMonitor(), pruning, MaskConflictRepair(), record]
    options: dict[str, Any] = {
        "precision": "64-true",
        "max_epochs": 4,
        "gradient_clip_val": 0.1,
        "use_distributed_sampler": False,
    }
    if devices > 1:
        options["plugins"] = [Synced()]
    fit(module, folder, *callbacks, strategy=strategy, devices=devices, **options)
    write(folder / f"main{os.environ.get('LOCAL_RANK', '')}.pt", module, compaction, [])


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], devices=2)
