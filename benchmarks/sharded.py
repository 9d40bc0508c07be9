"""Memory that pruning and compaction of a sharded decoder take, per process: a table for docs/guide/sharded.md.

    python benchmarks/sharded.py --processes 2 [--width 1024] [--depth 14]

A decoder of 210 M parameters trains in float32 with AdamW under FSDP2 on CPU processes, loses half of its channels, and
trains on. Peaks of resident memory are Linux's own (``VmHWM``, started anew for each phase), less what the process took
before it had a model. The limit is the peak of the fit itself, a copy of the process's share of weights and optimizer
states, twice the largest parameter with its states, and 100 MB.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from examples.sharded import Decoder
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction

WORDS, LENGTH = 16384, 8


class LanguageModel(pl.LightningModule):
    """Random words."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = Decoder(width, 16, depth, WORDS)

    def configure_model(self) -> None:
        """Shard before there is any data."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        for module in (self.net.embedding, self.net.head, self.net):
            fully_shard(module, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross entropy of the next words."""
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW: two states per parameter."""
        return torch.optim.AdamW(self.parameters(), 1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        """One batch per process and epoch."""
        words = torch.randint(WORDS, (2 * self.trainer.world_size, LENGTH + 1))
        return DataLoader(words, batch_size=2)  # type: ignore[arg-type]


def peak() -> float:
    """Peak of resident memory since `start_anew`, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def start_anew() -> None:
    """Let the peak be what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter(pl.Callback):
    """Measures the phases of a fit; one stands before all other callbacks, and one after them."""

    rows: ClassVar[dict[str, float]] = {}

    def __init__(self, first: bool) -> None:
        self.first = first

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on it is the fit's own."""
        start_anew()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pruning, from the first callback to the last."""
        if trainer.current_epoch == 1:
            self._turn("fit", "pruning")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compaction, from the first callback to the last."""
        if trainer.current_epoch == 1:
            if self.first:
                self.rows |= shares(trainer)
            self._turn("", "compaction")

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """What it holds and what is left."""
        if trainer.current_epoch == 1 and self.first:
            self.rows["parameters left"] = sum(p.numel() for p in trainer.lightning_module.parameters())

    def _turn(self, before: str, phase: str) -> None:
        if not self.first:
            self.rows[phase] = peak()
        elif before:
            self.rows[before] = peak()
        start_anew()


def shares(trainer: pl.Trainer) -> dict[str, float]:
    """Weights and states that this process holds, and the largest parameter with its states, in MB."""
    states = [v for o in trainer.optimizers for own in o.state.values() for v in own.values() if v.ndim]
    tensors = [*trainer.lightning_module.parameters(), *states]
    own = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
    largest = max(p.numel() * p.element_size() for p in trainer.lightning_module.parameters())
    return {
        "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
        "share": own / 2**20,
        "largest": 3 * largest / 2**20,
    }


def main() -> None:
    """Fit, and let rank 0 print the table's row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=14)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(0)
    base = peak()
    compaction = ModelCompaction(when=1, on_failure="raise", save=False)
    pruning = ChannelPruning("l2", amount=0.5, schedule="linear", start=0, end=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.processes,
        strategy=ModelParallelStrategy(data_parallel_size=args.processes, tensor_parallel_size=1),
        max_epochs=2,
        callbacks=[Meter(True), pruning, MaskConflictRepair(), compaction, Meter(False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(args.width, args.depth))
    everyone: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(everyone, {**Meter.rows, "base": base})
    if trainer.is_global_zero:
        show(everyone)
    torch.distributed.destroy_process_group()


def show(everyone: list[dict[str, float]]) -> None:
    """A row of the table: the largest of all processes."""
    row = {name: max(own[name] for own in everyone) for name in everyone[0]}
    limit = max(own["fit"] + own["share"] + 2 * own["largest"] + 100 - own["base"] for own in everyone)
    fit, pruning, compaction = (row[name] - row["base"] for name in ("fit", "pruning", "compaction"))
    print(row)
    print("| processes | parameters | share | fit | pruning | compaction | limit |\n|---|---|---|---|---|---|---|")
    print(
        f"| {len(everyone)} | {row['parameters'] / 1e6:.0f} M -> {row['parameters left'] / 1e6:.0f} M "
        f"| {row['share']:,.0f} | {fit:,.0f} | {pruning:,.0f} | {compaction:,.0f} | {limit:,.0f} |"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
