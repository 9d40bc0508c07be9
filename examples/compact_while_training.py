"""The network gets smaller while it trains.

What this example teaches:

1. ``ModelCompaction(when=...)`` removes what is masked in the middle of the fit, so that the epochs behind it are
   cheaper. The optimizer keeps its momentum, the masks and their schedule go on.
2. ``when=0.2`` acts as soon as a fifth of the parameters would go; ``when=[4, 8]`` before these epochs.
3. At the end what is left is removed, and the checkpoint holds all of it.

    make example NAME=compact_while_training
"""

from __future__ import annotations

import argparse
import time

import pytorch_lightning as pl
from fitting import Results, fit, main, sizes
from pytorch_lightning.callbacks import Callback

from digits import Classifier
from image_data import load
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from measuring import count_correct, relative_difference


class Watch(Callback):
    """Parameters and seconds of each epoch."""

    def __init__(self) -> None:
        self.params: list[int] = []
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, n: int) -> None:
        """The first batch of an epoch, behind what happens before it."""
        if n == 0:
            self._start = time.perf_counter()
            self.params.append(sum(p.numel() for p in pl_module.parameters()))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._start)


def run(args: argparse.Namespace) -> Results:
    """Train and prune, compact again and again, reload."""
    pl.seed_everything(0, verbose=False)
    model, data = Classifier(channels=1, size=16, width=16), load("digits", args.log_dir, limit=args.limit)
    before, watch = sizes(model.net, model.example_input_array[:1]), Watch()
    pruning = ChannelPruning("l1", amount=0.6, schedule="linear", end=args.epochs // 2)
    compaction = ModelCompaction(on_failure="raise", when=0.2)
    fit(args, model, data, [pruning, MaskConflictRepair(), compaction, watch])
    after = sizes(model.net, model.example_input_array[:1])
    again = load_compacted(compaction.checkpoint_path, Classifier)
    return {
        "parameters by epoch": tuple(watch.params),
        "seconds by epoch": tuple(watch.seconds),
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "accuracy": count_correct(again.net, data.test) / len(data.test),
        "error of the last compaction": compaction.certificate.max_error,
        "error of the reloaded": relative_difference(model.net, again.net, data.test.tensors[0][:64]),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=10)
