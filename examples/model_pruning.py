"""Lightning's own ``ModelPruning``, repaired and compacted.

What this example teaches:

1. ``ModelPruning`` masks, and leaves the network as large and slow as before. Its masks know one layer at a time.
2. ``MaskConflictRepair`` makes the masks of coupled layers agree, in the buffers of ``ModelPruning`` itself.
3. ``ModelCompaction`` removes what is masked. Nothing else in the program changes.

    make example NAME=model_pruning
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
from fitting import Results, fit, main, sizes
from pytorch_lightning.callbacks import ModelPruning
from torch import nn

from digits import Classifier
from image_data import load
from lightning_compress import MaskConflictRepair, ModelCompaction, load_compacted
from measuring import count_correct, relative_difference


def run(args: argparse.Namespace) -> Results:
    """Prune by ModelPruning, repair, compact, reload."""
    pl.seed_everything(0, verbose=False)
    data = load("digits", args.log_dir, limit=args.limit)
    model = Classifier(channels=1, size=16, width=16)
    before = sizes(model.net, model.example_input_array[:1])
    pruning = ModelPruning(
        "ln_structured",
        # Named, as `ln_structured` cannot prune the vectors of batch norms and biases.
        parameters_to_prune=[(m, "weight") for m in model.net.modules() if isinstance(m, nn.Conv2d)],
        amount=lambda epoch: 0.5 if epoch == args.epochs // 2 else 0,  # a constant amount would apply every epoch
        use_global_unstructured=False,
        use_lottery_ticket_hypothesis=False,  # it would set the weights back to their first values
        pruning_dim=0,
        pruning_norm=1,
    )
    repair, compaction = MaskConflictRepair(policy="score"), ModelCompaction(on_failure="raise")
    fit(args, model, data, [pruning, repair, compaction])
    after = sizes(model.net, model.example_input_array[:1])
    again = load_compacted(compaction.checkpoint_path, Classifier)
    return {
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "accuracy": count_correct(again.net, data.test) / len(data.test),
        "error of the compaction": compaction.certificate.max_error,
        "error of the reloaded": relative_difference(model.net, again.net, data.test.tensors[0][:64]),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=8)
