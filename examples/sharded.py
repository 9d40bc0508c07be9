"""Pruning and compaction of a decoder whose parameters are sharded over two processes (FSDP2).

What this example teaches:

1. ``ModelParallelStrategy`` with ``fully_shard`` in ``configure_model``: each process holds a part of every parameter.
   The callbacks are the same as on one device.
2. The network shrinks in the middle of the fit: each parameter is gathered, cut and sharded again, one after the other,
   with its optimizer state. All processes compare the masked and the compacted network.
3. The compacted checkpoint is one file, which loads on one device.

    make example NAME=sharded

On a CPU the processes talk over gloo; with ``--accelerator gpu`` two GPUs are used.
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from fitting import Results, parser, show
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from measuring import quieten

WORDS, LENGTH = 64, 16


class Attention(nn.Module):
    """Causal attention in which two query heads share one head of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.v_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens."""
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, n, -1))


class Block(nn.Module):
    """A layer as in Llama: RMS norms, attention, and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layer computes."""
        x = x + self.attention(self.attention_norm(x))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Logits of the next word."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of shape (batch, length, words)."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(pl.LightningModule):
    """Learns sequences that count in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder()

    def configure_model(self) -> None:
        """Shard each block, then the rest; on one device, where there is no mesh, leave the network whole."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of the next words."""
        words = batch[0]
        return F.cross_entropy(self.net(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, whose state is sharded as the parameters are."""
        return torch.optim.AdamW(self.parameters(), 3e-3)


def sequences(count: int, seed: int) -> Tensor:
    """Sequences of words, each with its own start and step."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(high, (count, 1), generator=generator) for high in (WORDS, 8))
    return (start + step * torch.arange(LENGTH + 1)) % WORDS


def run(args: argparse.Namespace) -> Results | None:
    """Fit on two processes; the results on rank 0, None on the other."""
    pl.seed_everything(0, verbose=False)
    model = LanguageModel()
    before = sum(parameter.numel() for parameter in model.parameters())
    pruning = ChannelPruning("l2", amount=0.5, schedule="linear", start=0, end=args.epochs // 2)
    compaction = ModelCompaction(on_failure="raise", when=args.epochs // 2)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=args.epochs,
        callbacks=[pruning, MaskConflictRepair(), compaction],
        default_root_dir=args.log_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(sequences(args.limit or 2048, 0)), batch_size=32, shuffle=True))
    if not trainer.is_global_zero:
        return None
    small, words = load_compacted(compaction.checkpoint_path, LanguageModel), sequences(256, 1)
    with torch.no_grad():
        guesses = small.net(words[:, :-1]).argmax(-1)
    return {
        "processes": trainer.world_size,
        "parameters": (before, sum(parameter.numel() for parameter in small.parameters())),
        "verified": compaction.certificate.verified,
        "accuracy": float((guesses == words[:, 1:])[:, 1:].float().mean()),
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
