"""Text, generation, graphs and series."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks.network import Network, integers, noise

__all__ = ["NETWORKS"]


def _call(module: str, name: str, *args: Any, **options: Any) -> nn.Module:
    net: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
    return net


# ---------------------------------------------------------------- diffusers


def _diffusers(name: str, **options: Any) -> nn.Module:
    return _call("diffusers", name, **options)


_BLOCKS = {"layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}
_UNET = _BLOCKS | {"sample_size": 16, "in_channels": 3, "out_channels": 3, "attention_head_dim": 8}
_UNET |= {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_COND = _BLOCKS | {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": 8,
    "cross_attention_dim": 24,
}
_COND |= {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_CODER = _BLOCKS | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
_SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "out_channels": 4,
}


def _latents(channels: int, **more: Any) -> Any:
    def inputs(batch: int) -> dict[str, Any]:
        rest = {name: make(batch) for name, make in more.items()}
        return {
            "sample": noise(channels, 16, 16)(batch),
            "timestep": torch.tensor([3] * batch),
            "return_dict": False,
        } | rest

    return inputs


def _tokens(batch: int) -> dict[str, Any]:
    classes = {"class_labels": torch.ones(batch, dtype=torch.long), "timestep": torch.full((batch,), 3)}
    return {"hidden_states": noise(4, 8, 8)(batch), "return_dict": False} | classes


def _joint(batch: int) -> dict[str, Any]:
    text = {"encoder_hidden_states": noise(5, 24)(batch), "pooled_projections": noise(16)(batch)}
    return {"hidden_states": noise(4, 8, 8)(batch), "timestep": torch.full((batch,), 3), "return_dict": False} | text


def _coded(batch: int) -> dict[str, Any]:
    return {"sample": noise(3, 16, 16)(batch), "return_dict": False}


# ---------------------------------------------------------------- language


def _wrapped(layers: str, **options: Any) -> nn.Module:
    package = importlib.import_module("x_transformers")
    inner = getattr(package, layers)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    net: nn.Module = package.TransformerWrapper(num_tokens=40, max_seq_len=16, attn_layers=inner)
    return net


def _seen() -> nn.Module:
    package = importlib.import_module("x_transformers")
    inner = package.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    net: nn.Module = package.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=inner)
    return net


def _adapted(merged: bool = False, **options: Any) -> nn.Module:
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.use_cache = False
    base = transformers.LlamaForCausalLM(config)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    net = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    return net.merge_and_unload() if merged else net  # type: ignore[no-any-return]


def _ids(batch: int) -> dict[str, Any]:
    return {"input_ids": integers(40, 6)(batch), "return_dict": False}


# ---------------------------------------------------------------- graphs


def _edges(nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(nodes)
    return torch.randint(0, nodes, (2, 3 * nodes), generator=generator)


def _graph(batch: int) -> tuple[Tensor, Tensor]:
    return noise(8)(6 * batch), _edges(6 * batch)


def _molecule(batch: int) -> tuple[Any, ...]:
    return integers(9)(5 * batch), 2 * noise(3)(5 * batch), torch.arange(batch).repeat_interleave(5)


def _near(positions: Tensor, molecules: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of atoms of a molecule, and their distances; the package's own function needs a C++ library."""
    same = molecules[:, None] == molecules[None, :]
    pairs = (same & ~torch.eye(len(positions), dtype=torch.bool)).nonzero().t()
    return pairs, (positions[pairs[0]] - positions[pairs[1]]).norm(dim=-1)


_GRAPH = "torch_geometric.nn.models"

NETWORKS = [
    Network("diffusers", "UNet2DModel", lambda: _diffusers("UNet2DModel", **_UNET), _latents(3)),
    Network(
        "diffusers",
        "UNet2DConditionModel",
        lambda: _diffusers("UNet2DConditionModel", **_COND),
        _latents(4, encoder_hidden_states=noise(5, 24)),
    ),
    Network(
        "diffusers",
        "AutoencoderKL",
        lambda: _diffusers("AutoencoderKL", **_CODER, latent_channels=4, sample_size=16),
        _coded,
    ),
    Network(
        "diffusers", "VQModel", lambda: _diffusers("VQModel", **_CODER, latent_channels=3, num_vq_embeddings=16), _coded
    ),
    Network(
        "diffusers",
        "AutoencoderTiny",
        lambda: _diffusers(
            "AutoencoderTiny",
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        _coded,
        dtype=torch.float32,
    ),
    Network(
        "diffusers",
        "DiTTransformer2DModel",
        lambda: _diffusers("DiTTransformer2DModel", **_HEADS, in_channels=4, out_channels=8, num_embeds_ada_norm=10),
        _tokens,
    ),
    Network("diffusers", "SD3Transformer2DModel", lambda: _diffusers("SD3Transformer2DModel", **_SD3), _joint),
    Network("x-transformers", "Decoder", lambda: _wrapped("Decoder"), integers(40, 8)),
    Network("x-transformers", "Encoder", lambda: _wrapped("Encoder"), integers(40, 8)),
    Network(
        "x-transformers",
        "Decoder with rotary and GLU",
        lambda: _wrapped("Decoder", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
        integers(40, 8),
    ),
    Network("x-transformers", "ViTransformerWrapper", _seen, noise(3, 32, 32)),
    Network("peft", "LoRA", _adapted, _ids, dtype=torch.float32),
    Network("peft", "LoRA, merged", lambda: _adapted(merged=True), _ids, dtype=torch.float32),
    Network("peft", "DoRA", lambda: _adapted(use_dora=True), _ids, dtype=torch.float32),
    *(
        Network("torch-geometric", name, lambda name=name, more=more: _call(_GRAPH, name, 8, 16, 3, 5, **more), _graph)
        for name, more in {
            "GCN": {},
            "GraphSAGE": {},
            "GIN": {},
            "GAT": {"heads": 2},
            "PNA": {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8, dtype=torch.long)},
            "EdgeCNN": {},
        }.items()
    ),
    Network(
        "torch-geometric",
        "SchNet",
        lambda: _call(_GRAPH, "SchNet", 16, 16, 2, 8, interaction_graph=_near),
        _molecule,
    ),
]
