"""A vision transformer loses attention heads and MLP neurons.

What this example teaches:

1. Heads and neurons are channels like any others: ``amount`` takes a fraction for each pattern of layer names, here
   half of the heads of each attention and 60 % of each MLP. torchvision's transformer is used as it is.
2. ``layers`` leaves all others alone: the token stream, which all blocks share, keeps its width.
3. What is compacted is still torchvision's class; the checkpoint loads into it.

    make example NAME=vit
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from fitting import Results, fit, main, sizes
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import VisionTransformer

from image_data import load
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from measuring import count_correct, relative_difference


class Transformer(pl.LightningModule):
    """torchvision's VisionTransformer on grey images of 16 x 16 pixels."""

    def __init__(self, hidden: int = 64, heads: int = 4, layers: int = 3, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = VisionTransformer(16, 4, layers, heads, hidden, 2 * hidden, num_classes=10)
        self.example_input_array = torch.zeros(2, 1, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) -> (N, 10)."""
        return self.net(x.expand(-1, 3, -1, -1))

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
    model = Transformer()
    before = sizes(model, model.example_input_array[:1])
    # Neither the patches' projection nor the output of a block may lose channels: they make the token stream.
    pruning = ChannelPruning(amount={"*self_attention": 0.5, "*mlp.0": 0.6}, layers=["*self_attention", "*mlp.0"])
    compaction = ModelCompaction(on_failure="raise")
    fit(args, model, data, [pruning, MaskConflictRepair(), compaction])
    after = sizes(model, model.example_input_array[:1])
    again = load_compacted(compaction.checkpoint_path, Transformer)
    block = again.net.encoder.layers[0]
    return {
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "heads of a block": (model.hparams.heads, block.self_attention.num_heads),
        "neurons of a block": (2 * model.hparams.hidden, block.mlp[0].out_features),
        "width of the token stream": (model.hparams.hidden, block.ln_1.normalized_shape[0]),
        "accuracy": count_correct(again, data.test) / len(data.test),
        "error of the compaction": compaction.certificate.max_error,
        "error of the reloaded": relative_difference(model, again, data.test.tensors[0]),
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=12)
