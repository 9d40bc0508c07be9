"""A recurrent network loses hidden units.

What this example teaches:

1. A hidden unit of an LSTM is a channel: its rows in all four gates, its column in the recurrent weight, and whatever
   reads it go together. An image is read here row by row, by two layers.
2. Both layers lose equally many units, as an LSTM has one ``hidden_size``; which ones is each layer's own choice.
3. A unit may go where its masked cell stays at zero from the first step on, so the sequence starts from zeros.

    make example NAME=lstm
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from fitting import Results, fit, main, sizes
from torch import Tensor, nn
from torch.nn import functional as F

from image_data import load
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from measuring import count_correct, relative_difference


class Reader(pl.LightningModule):
    """Reads grey images of 16 x 16 pixels row by row."""

    def __init__(self, hidden: int = 64, layers: int = 2, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lstm, self.head = nn.LSTM(16, hidden, layers, batch_first=True), nn.Linear(hidden, 10)
        self.example_input_array = torch.zeros(2, 1, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) -> (N, 10)."""
        states, _ = self.lstm(x.squeeze(1))
        return self.head(states[:, -1])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of one batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def run(args: argparse.Namespace) -> Results:
    """Train and prune, compact, reload."""
    pl.seed_everything(0, verbose=False)
    data = load("digits", args.log_dir, limit=args.limit)
    model = Reader()
    before = sizes(model, model.example_input_array[:1])
    compaction = ModelCompaction(on_failure="raise")
    fit(args, model, data, [ChannelPruning("l2", amount=0.5), MaskConflictRepair(), compaction])
    after = sizes(model, model.example_input_array[:1])
    again = load_compacted(compaction.checkpoint_path, Reader)
    return {
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "hidden units": (model.hparams.hidden, again.lstm.hidden_size),
        "accuracy": count_correct(again, data.test) / len(data.test),
        "error of the compaction": compaction.certificate.max_error,
        "error of the reloaded": relative_difference(model, again, data.test.tensors[0]),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=12)
