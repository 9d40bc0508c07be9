"""A checkpoint that was trained elsewhere, compacted on this machine.

What this example teaches:

1. A masked checkpoint is all that is needed: the training may have run under FSDP, on another machine, or without any
   of our callbacks. Here, half of the filters of some layers are simply zero.
2. ``compact_checkpoint`` removes them, verifies the result, and writes a checkpoint that ``load_compacted`` reads.
3. The compacted file is smaller still: it leaves out what only the training needs.

    make example NAME=offline_compaction
"""

from __future__ import annotations

import argparse
import os

import pytorch_lightning as pl
import torch
from fitting import Results, fit, main, sizes

import engine
from digits import Classifier
from image_data import load
from lightning_compress import compact_checkpoint, load_compacted
from measuring import count_correct, relative_difference


@torch.no_grad()
def zero_half(net: torch.nn.Module, example: torch.Tensor) -> None:
    """Set half of the channels of each dependency group to zero, those with the smallest weights."""
    groups = [group for group in engine.dependency_groups(net, example) if group.reason is None]
    for group in groups:
        scores = torch.zeros(group.size)
        for member in group.members:
            if member.role == "out" and member.units.ndim > 1:
                norms = net.get_parameter(member.parameter).flatten(1).norm(dim=1)
                mine = member.units.flatten() >= 0  # a layer may output channels of several groups
                scores.index_add_(0, member.units.flatten()[mine], norms[mine])
        keep = scores >= scores.median()
        for module, own in engine.group_masks([group], {group.name: keep}).items():
            for name, mask in own.items():
                net.get_submodule(module).get_parameter(name).mul_(mask)


def run(args: argparse.Namespace) -> Results:
    """Train densely, set channels to zero, save; then compact the file, and load it."""
    pl.seed_everything(0, verbose=False)
    data = load("digits", args.log_dir, limit=args.limit)
    model = Classifier(channels=1, size=16, width=16)
    example = model.example_input_array[:1]
    trainer = fit(args, model, data)
    zero_half(model.net, example)
    masked, small = args.log_dir / "masked.ckpt", args.log_dir / "small.ckpt"
    trainer.save_checkpoint(masked)

    compact_checkpoint(masked, Classifier, small)

    again = load_compacted(small, Classifier)
    return {
        "MACs": (sizes(model.net, example)[0], sizes(again.net, example)[0]),
        "parameters": (sizes(model.net, example)[1], sizes(again.net, example)[1]),
        "bytes on disk": (os.path.getsize(masked), os.path.getsize(small)),
        "right test images": (count_correct(model.net, data.test), count_correct(again.net, data.test)),
        "difference": relative_difference(model.net, again.net, data.test.tensors[0][:64]),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=6)
