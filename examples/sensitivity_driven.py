"""How much of which layer: measured, instead of the same amount everywhere.

What this example teaches:

1. ``analyze_sensitivity`` prunes one dependency group after the other by several amounts and validates each time. The
   module stays as it is. The heat map and the curves go to TensorBoard.
2. ``table.suggest(budget)`` turns the measurements into an amount for each layer: the most that each bears before the
   metric falls by more than the budget.
3. ``ChannelPruning(amount=...)`` takes them as they are.

    make example NAME=sensitivity_driven
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
from fitting import Results, fit, main, sizes
from torch.utils.data import DataLoader

from digits import Classifier
from image_data import load
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, analyze_sensitivity
from measuring import count_correct


def run(args: argparse.Namespace) -> Results:
    """Train, measure, prune by what was measured, compact."""
    pl.seed_everything(0, verbose=False)
    data = load("digits", args.log_dir, limit=args.limit)
    model = Classifier(channels=1, size=16, width=16)
    before = sizes(model.net, model.example_input_array[:1])
    trainer = fit(args, model, data)
    dense = count_correct(model.net, data.test) / len(data.test)

    validation = DataLoader(data.train, 256)  # not the test set, which is for the result
    table = analyze_sensitivity(
        trainer, model, dataloaders=validation, metric="test/accuracy", sparsities=[0.25, 0.5, 0.75], group=True
    )
    for kind in ("heatmap", "curves"):
        table.plot(kind=kind, writer=trainer.logger.experiment)
    amounts = table.suggest(0.05)

    compaction = ModelCompaction(on_failure="raise")
    fit(args, model, data, [ChannelPruning("l1", amount=amounts), MaskConflictRepair(), compaction])
    after = sizes(model.net, model.example_input_array[:1])
    return {
        **{f"bears in {layer}": share for layer, share in amounts.items()},
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "accuracy": (dense, count_correct(model.net, data.test) / len(data.test)),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=8)
