"""Language models in the shapes that people use, without weights: traced, masked, planned and counted on ``meta``."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.sensitivity.importance import cut

__all__ = ["SHAPES", "build", "planned", "tokens"]

clock = time.process_time

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 1 B": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "Llama 8 B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Llama 70 B": (
        "llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Qwen3 8 B": (
        "qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "Mixtral 8 x 7 B": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
    ),
}


def build(name: str, **changes: Any) -> nn.Module:
    """Return a language model of a shape, in bfloat16, eval mode, without weights.

    Args:
        name: of the shape.
        changes: of its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # of the extra `bench`; asked for by name only

    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **{**sizes, **changes})
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def tokens(number: int = 16) -> dict[str, Any]:
    """Return an input of one sequence."""
    return {"input_ids": torch.zeros(1, number, dtype=torch.long, device="meta"), "use_cache": False}


def _halves(groups: list[engine.Group]) -> dict[str, Tensor]:
    """Keep the first half of the units of every group that may lose some; without weights all are alike."""
    scores = ((g, torch.arange(g.size, 0, -1, dtype=torch.float64)) for g in groups if g.reason is None)
    return {g.name: cut(score, 0.5, g.rows) for g, score in scores}


def planned(model: nn.Module) -> dict[str, Any]:
    """Trace a model, mask half of the units of each dependency group, plan and count.

    Returns:
        CPU seconds of each step, sizes and costs before and after, and why groups stay whole.
    """
    x, seconds = tokens(), {}
    start = clock()
    graph = engine.trace(model, x)
    seconds["trace"] = clock() - start
    start = clock()
    groups = engine.dependency_groups(model, x, graph=graph)
    masks = engine.group_masks(groups, _halves(groups))
    seconds["masks"] = clock() - start
    start = clock()
    speedup = engine.ModelSpeedup(model, x, masks, confidence=0, graph=graph)
    whole = engine.count_flops_params(model, x, verbose=False, graph=graph)
    predicted = engine.count_flops_params(model, x, verbose=False, graph=graph, masks=masks)
    seconds["count"] = clock() - start
    start = clock()
    small = speedup.speedup_model()
    seconds["plan"] = clock() - start
    after = sum(p.numel() for p in small.parameters())
    if after != predicted[1]:
        raise RuntimeError(f"{predicted[1]} parameters were predicted, {after} came out.")
    return {
        "nodes": len(graph.nodes),
        "groups": [sum(g.reason is None for g in groups), len(groups)],
        "stays": sorted({g.reason for g in groups if g.reason is not None}),
        "seconds": seconds,
        "parameters": [whole[1], after],
        "macs": [whole[0], predicted[0]],
    }
