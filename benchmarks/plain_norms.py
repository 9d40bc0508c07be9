"""Latency of a compacted decoder beside one built narrow by hand, in turns.

    python benchmarks/plain_norms.py

Half of the heads, of the neurons and of the stream of a Llama-shaped decoder of transformers is removed. Three networks
of the same shapes run in turns, in a random order each time: one that keeps the statistics of all channels
(``plain_norms=False``), one whose RMS norms became ordinary (``plain_norms="exact"``), and transformers' own class from
the small configuration. Ratios are medians over turns of the ratio to the latter in the same turn, of CPU time on one
thread.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine

SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "use_cache": False,
}
HALF = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


class Logits(nn.Module):
    """A decoder of which the logits alone are used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(input_ids=words).logits


def decoder(**sizes: int) -> Logits:
    """Return a decoder with random weights."""
    torch.manual_seed(0)
    return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes}))).eval()


def compacted(words: Tensor, plain_norms: bool | str) -> nn.Module:
    """Return a decoder that lost half of each group."""
    model = decoder()
    groups = [group for group in engine.dependency_groups(model, words) if group.reason is None]
    masks = engine.group_masks(groups, {g.name: torch.arange(g.size) < g.size // 2 for g in groups})
    speedup = engine.ModelSpeedup(model, words, masks, confidence=0, plain_norms=plain_norms)
    return speedup.speedup_model()


def turns(networks: dict[str, nn.Module], words: Tensor, count: int) -> dict[str, list[float]]:
    """Return CPU seconds of each network in each turn."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    order = random.Random(0)
    with torch.no_grad():
        for turn in range(count + 5):
            for name in order.sample(list(networks), len(networks)):
                start = time.thread_time()
                networks[name](words)
                if turn >= 5:  # the first ones warm up
                    times[name].append(time.thread_time() - start)
    return times


def main() -> int:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = torch.randint(512, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    small = {name: compacted(words, way) for name, way in (("all channels", False), ("ordinary", "exact"))}
    hand = decoder(**{name: SIZES[name] // 2 for name in HALF})
    hand.load_state_dict(small["ordinary"].state_dict())
    same = [type(m) for m in small["ordinary"].modules()] == [type(m) for m in hand.modules()]
    shapes = [p.shape for p in small["ordinary"].parameters()] == [p.shape for p in hand.parameters()]
    times = turns({**small, "by hand": hand, "by hand again": copy.deepcopy(hand)}, words, args.turns)
    print(f"classes as by hand: {same}, shapes as by hand: {shapes}")
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["by hand"], strict=True)]
        print(f"{name:16} {statistics.median(own) * 1e3:7.2f} ms  {statistics.median(ratios):.3f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
