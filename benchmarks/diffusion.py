"""Small networks that diffusers loads by itself: half of each group masked, compacted, saved, loaded.

    python benchmarks/diffusion.py [class ...]          (the table becomes a part of docs/stock.md)

Six classes in small form, in float32, everything in them random. Half of each dependency group is masked and removed,
which the certificate verifies; then `lightning_compress.save_pretrained` writes the network, or says why not.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from engine.errors import EngineError
from lightning_compress import save_pretrained

PAGE = Path(__file__).resolve().parents[1] / "docs" / "stock.md"
HEADING = "## diffusers"
HEAD = f"""{HEADING}

`python benchmarks/diffusion.py` does the same with classes of diffusers {diffusers.__version__} in small form. The
error is that of the compacted network beside the masked one, in float64.

| class | parameters, k | exact | error | saved, or why not |
|---|---:|---|---:|---|
"""
Inputs = Callable[[], dict[str, Tensor]]

BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
TRANSFORMER = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4, "in_channels": 4}
JOINT = {"joint_attention_dim": 24, "pooled_projection_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        **BLOCKS,
        "sample_size": 16,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DConditionModel": {
        **BLOCKS,
        "sample_size": 16,
        "attention_head_dim": 4,
        "cross_attention_dim": 24,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    },
    "AutoencoderKL": {
        **BLOCKS,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "DiTTransformer2DModel": {
        **TRANSFORMER,
        "out_channels": 4,
        "sample_size": 8,
        "patch_size": 2,
        "norm_num_groups": 8,
        "num_embeds_ada_norm": 10,
    },
    "SD3Transformer2DModel": {
        **TRANSFORMER,
        **JOINT,
        "sample_size": 8,
        "patch_size": 2,
        "caption_projection_dim": 32,
        "out_channels": 4,
    },
    "FluxTransformer2DModel": {
        **TRANSFORMER,
        **JOINT,
        "num_single_layers": 1,
        "axes_dims_rope": (2, 2, 4),
    },
}


def inputs(name: str) -> dict[str, Tensor]:
    """Return what a class takes, two samples."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    steps, texts = torch.tensor([3, 7]), noise(2, 5, 24)
    joint = {"encoder_hidden_states": texts, "pooled_projections": noise(2, 16), "timestep": steps / 10}
    return {
        "UNet2DModel": {"sample": noise(2, 3, 16, 16), "timestep": steps},
        "UNet2DConditionModel": {"sample": noise(2, 4, 16, 16), "timestep": steps, "encoder_hidden_states": texts},
        "AutoencoderKL": {"sample": noise(2, 3, 16, 16)},
        "DiTTransformer2DModel": {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": steps,
            "class_labels": torch.tensor([1, 2]),
        },
        "SD3Transformer2DModel": {"hidden_states": noise(2, 4, 8, 8), **joint},
        "FluxTransformer2DModel": {
            "hidden_states": noise(2, 16, 4),
            **joint,
            "img_ids": noise(16, 3),
            "txt_ids": noise(5, 3),
        },
    }[name]


def built(name: str) -> nn.Module:
    """Return a class in small form, with everything random: some start at zero."""
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or float(parameter.std()) < 1e-3:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def check(name: str, confidence: int = 1) -> dict[str, Any]:
    """Compact a class, save it, and return what came of it."""
    model, example = built(name), inputs(name)
    before = sum(p.numel() for p in model.parameters())
    graph = engine.trace(model, example)
    groups = [g for g in engine.dependency_groups(model, example, graph=graph) if g.reason is None]
    masks = engine.group_masks(groups, {g.name: torch.arange(g.size) < (g.size + 1) // 2 for g in groups})
    speedup = engine.ModelSpeedup(model, example, masks, confidence=confidence, graph=graph, plain_norms="exact")
    speedup.speedup_model()
    after = sum(p.numel() for p in model.parameters())
    row = {"class": name, "parameters": (before, after), "certificate": speedup.certificate}
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved = save_pretrained(model, Path(folder, "small"), example_input=example)
        except EngineError as error:
            return row | {"reason": str(error).split(" Prune with")[0]}
    return row | {"config": dict(saved.config), "error": saved.error}


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    before, after = row["parameters"]
    certificate = row["certificate"]
    changes = ", ".join(f"{name}={value:g}" for name, value in row.get("config", {}).items())
    outcome = row.get("reason") or f"{changes}; error {row['error']:.0e}"
    exact = "yes" if certificate.exact and certificate.verified else "no"
    sizes = f"{before / 1e3:.0f} → {after / 1e3:.0f}"
    return f"| {row['class']} | {sizes} | {exact} | {certificate.max_error:.0e} | {outcome} |"


def main() -> int:
    """Print each row, and write the table if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", metavar="class", help=", ".join(CONFIGS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines = []
    for name in args.classes or CONFIGS:
        lines.append(line(check(name)))
        print(lines[-1], flush=True)
    if not args.classes:
        page = PAGE.read_text().partition(f"\n{HEADING}")[0].rstrip("\n")
        PAGE.write_text(f"{page}\n\n{HEAD}" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
