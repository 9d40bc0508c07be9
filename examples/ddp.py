"""Pruning and compaction on two processes (DistributedDataParallel).

What this example teaches:

1. Nothing changes: the same callbacks, ``strategy="ddp"``. Rank 0 chooses the masks and sends them, so that all
   ranks mask and remove the same channels.
2. The plan and its certificate are made on rank 0; every rank ends with the same small network, and one checkpoint is
   written.

    make example NAME=ddp

On a CPU the processes talk over gloo; with ``--accelerator gpu`` two GPUs are used.
"""

from __future__ import annotations

import argparse
import hashlib

import pytorch_lightning as pl
import torch
from fitting import Results, fit, parser, show, sizes
from torch.distributed import all_gather_object

from digits import Classifier
from image_data import load
from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction, load_compacted
from measuring import count_correct, quieten


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of all parameters and buffers of the network; not of metrics, which each rank keeps for itself."""
    content = b"".join(t.detach().cpu().numpy().tobytes() for t in model.net.state_dict().values())
    return hashlib.sha256(content).hexdigest()[:12]


def run(args: argparse.Namespace) -> Results | None:
    """Fit on two processes; the results on rank 0, None on the other."""
    pl.seed_everything(0, verbose=False)
    data = load("digits", args.log_dir, limit=args.limit)
    model = Classifier(channels=1, size=16, width=16)
    before = sizes(model.net, model.example_input_array[:1])
    compaction = ModelCompaction(on_failure="raise")
    callbacks = [ChannelPruning("l1", amount=0.5), MaskConflictRepair(), ComplexityMonitor(), compaction]
    trainer = fit(args, model, data, callbacks, strategy="ddp", devices=2)
    hashes: list[str] = [""] * trainer.world_size
    all_gather_object(hashes, fingerprint(model))
    if not trainer.is_global_zero:
        return None
    after = sizes(model.net, model.example_input_array[:1])
    again = load_compacted(compaction.checkpoint_path, Classifier)
    return {
        "processes": trainer.world_size,
        "same weights on all ranks": len(set(hashes)) == 1,
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "accuracy": count_correct(again.net, data.test) / len(data.test),
        "checkpoint": compaction.checkpoint_path,
    }


if __name__ == "__main__":
    # Lightning starts the second process by running this file again, with the same options.
    quieten()
    torch.set_num_threads(1)
    results = run(parser(__doc__, epochs=6).parse_args())
    if results is not None:
        show(results)
    torch.distributed.destroy_process_group()
