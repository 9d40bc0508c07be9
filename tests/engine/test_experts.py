"""Mixtures of experts of transformers, small and with random weights, in each of its implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import engine
from tests.engine.exactness import masked, parameters, relative_error

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}


def built(kind: str, how: str, dtype: torch.dtype) -> nn.Module:
    """Return a language model of a kind, with large random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=how)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.to(dtype).eval()


def words(batch: int, seed: int = 0) -> dict[str, Any]:
    """Return an input."""
    ids = torch.randint(1, 20, (batch, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "use_cache": False}


@pytest.mark.parametrize("how", ["batched_mm", "eager", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_transformers(kind: str, how: str) -> None:
    """Half of the heads, neurons and stream go; other words find their way to other experts."""
    if how == "grouped_mm" and not hasattr(torch.nn.functional, how):
        pytest.skip("grouped products came with torch 2.10")
    dtype = torch.float32 if how == "grouped_mm" else torch.float64  # the kernel takes no float64
    model = built(kind, how, dtype)
    groups = engine.dependency_groups(model, words(2))
    keep = {g.name: torch.arange(g.size) < (g.size + 1) // 2 for g in groups if g.reason is None}
    assert sum(g.name.endswith("experts") for g in groups if g.reason is None) == 2
    masks = engine.group_masks(groups, keep)
    reference, before = masked(model, masks), parameters(model)
    predicted = engine.count_flops_params(model, words(2), verbose=False, masks=masks)
    speedup = engine.ModelSpeedup(model, words(2), masks)
    speedup.speedup_model()
    assert speedup.certificate.verified and parameters(model) < 0.4 * before
    assert predicted[1] == parameters(model)
    for seed in (0, 1):
        with torch.no_grad():
            old, new = (m(**words(3, seed)).logits for m in (reference, model))
        assert relative_error([old], [new]) < (1e-4 if how == "grouped_mm" else 1e-9)
