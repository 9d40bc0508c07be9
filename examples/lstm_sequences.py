"""An LSTM loses hidden units.

What this example teaches:

1. The hidden units of recurrent layers are channels too. A unit goes with its four gates, the recurrent weights that
   read it, and the columns of the layer behind.
2. What a unit costs is counted per time step, so that the MACs are those of the whole sequence.

Digits are read as a sequence of 16 rows of 16 pixels.

    make example NAME=lstm_sequences
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
    """Two layers of LSTM, then a classifier of the last state."""

    def __init__(self, hidden: int = 48, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(16, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 10)
        self.example_input_array = torch.zeros(2, 1, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16 rows, 16 columns) -> (N, 10)."""
        states, _ = self.lstm(x[:, 0])
        return self.head(states[:, -1])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of one batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


def run(args: argparse.Namespace) -> Results:
    """Train and prune, compact, reload."""
    pl.seed_everything(0, verbose=False)
    model, data = Reader(), load("digits", args.log_dir, limit=args.limit)
    before = sizes(model, model.example_input_array[:1])
    compaction = ModelCompaction(on_failure="raise")
    fit(args, model, data, [ChannelPruning("l2", amount=0.5), MaskConflictRepair(), compaction])
    after = sizes(model, model.example_input_array[:1])
    again = load_compacted(compaction.checkpoint_path, Reader)
    return {
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "hidden units": (model.hparams.hidden, again.head.in_features),
        "accuracy": count_correct(again, data.test) / len(data.test),
        "error of the compaction": compaction.certificate.max_error,
        "error of the reloaded": relative_difference(model, again, data.test.tensors[0]),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=15)
