"""Small models of transformers, compacted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3}
SPEECH = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 4,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
OPT = {"vocab_size": 50, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 16}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 16, "max_position_embeddings": 16}),
    "bert": ("BertForMaskedLM", SMALL),
    "roberta": ("RobertaForMaskedLM", SMALL),
    "vit": ("ViTForImageClassification", SMALL | IMAGES),
    "whisper": ("WhisperForConditionalGeneration", SPEECH),
}
PLAIN = ("gpt2", "opt", "bert", "roberta", "vit", "whisper")


def built(name: str, **fields: Any) -> nn.Module:
    """Return a small random model; norms and biases are random, too."""
    torch.manual_seed(0)
    cls, sizes = CONFIGS[name]
    kind = getattr(transformers, cls)
    model: nn.Module = kind(kind.config_class(**{**sizes, **fields})).eval()
    model.config.use_cache = False  # or keys and values are outputs
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    """Return random inputs for a model."""
    torch.manual_seed(0)
    words = torch.randint(3, 49, (2, 6))
    by_name = {
        "input_ids": {"input_ids": words},
        "pixel_values": {"pixel_values": torch.randn(2, 3, 8, 8)},
        "input_features": {"input_features": torch.randn(2, 4, 16), "decoder_input_ids": words},
    }
    return by_name[model.main_input_name]


class Logits(nn.Module):
    """A model of which the logits alone are used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        """Return the logits."""
        return self.model(**inputs).logits


def half(model: Logits, **sizes: int) -> dict[str, dict[str, Tensor]]:
    """Return masks of half of the units of each group, or of as many as stay, by the name of a layer in it."""
    groups = [group for group in engine.dependency_groups(model, inputs(model.model)) if group.reason is None]
    keep = {}
    for group in groups:
        stays = next((n for layer, n in sizes.items() if any(layer in name for name in group.layers)), group.size // 2)
        keep[group.name] = torch.randperm(group.size) < stays
    return engine.group_masks(groups, keep)


def compacted(name: str, plain_norms: bool = True, fields: Any = None, **sizes: int) -> nn.Module:
    """Return a small model that lost half of its heads, neurons and stream."""
    model = Logits(built(name, **(fields or {})))
    plain = plain_norms and name in PLAIN
    masks = half(model, **sizes)
    engine.ModelSpeedup(model, inputs(model.model), masks, confidence=1, plain_norms=plain).speedup_model()
    return model.model
