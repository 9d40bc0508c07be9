"""A small Llama loses half of its heads, neurons and stream while it trains, and plain transformers loads the result.

What this example teaches:

1. ``uniform=True`` keeps equal numbers in layers that a configuration describes with one number; which units stay is
   chosen in each layer by itself.
2. `lightning_compress.save_pretrained` derives the configuration of the small network and turns its RMS norms into
   ordinary ones. A fresh process without this project loads the folder by ``from_pretrained``.
3. Perplexity before and after, and of what was loaded. The text is the reference that Python's ``help()`` shows, byte
   by byte.

    make example NAME=language_model
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytorch_lightning as pl
import torch
import transformers
from fitting import Results, fit, main, sizes
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from image_data import Data
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, save_pretrained

LENGTH = 64

FRESH = """
import sys, torch, transformers
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("engine", "lightning_compress"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
torch.set_num_threads(1)
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
words = torch.load(sys.argv[2])
with torch.no_grad():
    losses = [model(input_ids=part, labels=part).loss for part in words.split(64)]
print(float(torch.stack(losses).mean().exp()))
"""


def text(limit: int | None) -> Data:
    """Python's reference in pieces of a fixed length: the last tenth is for testing."""
    words = torch.tensor(list("".join(topics.values()).encode("ascii", "replace")))
    pieces = words[: len(words) // LENGTH * LENGTH].view(-1, LENGTH)
    train, test = pieces[: -len(pieces) // 10], pieces[-len(pieces) // 10 :]
    test = test[: len(test) // 64 * 64]
    return Data(TensorDataset(train[:limit]), TensorDataset(test[: limit and 64]))


class Llama(pl.LightningModule):
    """A Llama of two layers on bytes."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=LENGTH,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.net = transformers.LlamaForCausalLM(config)
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.int64)

    def forward(self, words: Tensor) -> Tensor:
        """(N, L) -> (N, L, 128)."""
        return self.net(input_ids=words).logits

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy of the next byte."""
        (words,) = batch
        return F.cross_entropy(self(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


@torch.no_grad()
def perplexity(model: Llama, words: Tensor) -> float:
    """How many bytes the model hesitates between."""
    model.eval()
    losses = [model.training_step([part]) for part in words.split(64)]
    model.train()
    return math.exp(float(torch.stack(losses).mean()))


def run(args: argparse.Namespace) -> Results:
    """Train, prune while training, save, and load in a fresh process."""
    pl.seed_everything(0, verbose=False)
    data = text(args.limit)
    words = data.test.tensors[0]
    model = Llama()
    before = sizes(model, model.example_input_array[:1])
    fit(args, model, data)
    dense = perplexity(model, words)
    pruning = ChannelPruning(amount=0.5, exclude="*lm_head", uniform=True)
    compaction = ModelCompaction(on_failure="raise", dirpath=args.log_dir)
    fit(args, model, data, [pruning, MaskConflictRepair(), compaction])
    after = sizes(model, model.example_input_array[:1])
    saved = save_pretrained(model.net, args.log_dir / "small-llama")
    torch.save(words, args.log_dir / "words.pt")
    command = [sys.executable, "-c", FRESH, "small-llama", "words.pt"]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(args.log_dir))
    return {
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "configuration": ", ".join(f"{name}={value:g}" for name, value in sorted(saved.config.items())),
        "perplexity": (dense, perplexity(model, words)),
        "perplexity of what was loaded": float(fresh.stdout),
        "error of what was saved": saved.error,
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=4)
