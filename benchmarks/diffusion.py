"""Small networks that diffusers loads by itself: half of each group masked, compacted, saved, loaded.

    python benchmarks/diffusion.py [class ...]          (the table becomes a part of docs/stock.md)

Six classes in small form, in float32, everything in them random. Half of each dependency group is masked and removed,
which the certificate verifies. Then a dry run says which groups a configuration can describe, exactly and with ordinary
norms; half of these is removed from the class anew, `lightning_compress.save_pretrained` writes it, diffusers loads it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from engine.sensitivity.importance import cut
from lightning_compress import save_pretrained
from lightning_compress.stock.forecast import forecast, part_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "stock.md"
HEADING = "## diffusers"
HEAD = f"""{HEADING}

`python benchmarks/diffusion.py` does the same with classes of diffusers {diffusers.__version__} in small form. *Exact*
and *error* are of the network without half of every group, beside the masked one, in float64. *Saved* is what
`save_pretrained` writes and diffusers loads again (within 1e-6 of the largest output) where the groups in the way are
left alone, exactly or with `plain_norms=True`.

| class | parameters, k | exact | error | saved exactly | saved with plain norms |
|---|---:|---|---:|---|---|
"""
REASONS = """
What is in the way, by class and with plain norms, as the dry run (`summarize(..., stock=True)`) says it:

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


def half(groups: Sequence[engine.Group]) -> dict[str, Tensor]:
    """Return which units stay of each group, as many in each of its rows."""
    return {g.name: cut(torch.arange(g.size, 0, -1).double(), 0.5, g.rows) for g in groups if g.reason is None}


def check(name: str, confidence: int = 1) -> dict[str, Any]:
    """Compact a class, save what can be saved of it, and return what came of it."""
    model, example = built(name), inputs(name)
    before = size(model)
    graph = engine.trace(model, example)
    masks = engine.group_masks(groups := engine.dependency_groups(model, example, graph=graph), half(groups))
    speedup = engine.ModelSpeedup(model, example, masks, confidence=confidence, graph=graph)
    speedup.speedup_model()
    saved = {plain: loadable(name, plain) for plain in (False, True)}
    return {"class": name, "parameters": (before, size(model)), "certificate": speedup.certificate, "saved": saved}


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def loadable(name: str, plain: bool) -> dict[str, Any]:
    """Save a class without half of each group that a configuration can describe."""
    model, example = built(name), inputs(name)
    graph = engine.trace(model, example)
    groups = engine.dependency_groups(model, example, graph=graph)
    part, keep = part_of(model, example), half(groups)
    assert part is not None
    one = forecast(model, graph, groups, keep, part, amount=0.5, plain_norms=plain)
    row: dict[str, Any] = {"obstacles": one.obstacles, "groups": len(keep), "parameters": size(model)}
    if one.config is None:
        return row
    whole = {group for obstacle in one.obstacles for group in obstacle.groups}
    masks = engine.group_masks(groups, {group: units for group, units in keep.items() if group not in whole})
    engine.ModelSpeedup(model, example, masks, confidence=1, graph=graph, plain_norms=plain).speedup_model()
    with tempfile.TemporaryDirectory() as folder:
        saved = save_pretrained(model, Path(folder, "small"), example_input=example)
    return row | {"config": dict(saved.config), "error": saved.error, "left": size(model)}


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    before, after = row["parameters"]
    certificate = row["certificate"]
    exact = "yes" if certificate.exact and certificate.verified else "no"
    sizes = f"{before / 1e3:.0f} → {after / 1e3:.0f}"
    cells = [outcome(row["saved"][plain]) for plain in (False, True)]
    return f"| {row['class']} | {sizes} | {exact} | {certificate.max_error:.0e} | {' | '.join(cells)} |"


def outcome(saved: dict[str, Any]) -> str:
    """Return what was saved, or that nothing was."""
    whole = sum(len(obstacle.groups) for obstacle in saved["obstacles"])
    if "config" not in saved:
        return f"nothing: {whole} of {saved['groups']} groups are in the way"
    if saved["left"] == saved["parameters"]:
        return f"nothing: {whole} of {saved['groups']} groups are in the way, and none of the others loses units"
    changes = ", ".join(f"{name}={value:g}" for name, value in saved["config"].items())
    rest = f" ({whole} of {saved['groups']} groups whole)" if whole else ""
    return f"{changes}: {saved['left'] / 1e3:.0f}{rest}"


def reasons(row: dict[str, Any]) -> str:
    """Return a line for each reason."""
    lines = [f"- {row['class']}"]
    for obstacle in row["saved"][True]["obstacles"]:
        names = ", ".join(f"`{name}`" for name in obstacle.groups[:2])
        more = f" and {len(obstacle.groups) - 2} more" if len(obstacle.groups) > 2 else ""
        lines.append(f"    - {names}{more}: {obstacle.reason}")
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]}: nothing"


def main() -> int:
    """Print each row, and write the table if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", metavar="class", help=", ".join(CONFIGS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines, notes = [], []
    for name in args.classes or CONFIGS:
        row = check(name)
        lines.append(line(row))
        notes.append(reasons(row))
        print(lines[-1], notes[-1], sep="\n", flush=True)
    if not args.classes:
        page = PAGE.read_text().partition(f"\n{HEADING}")[0].rstrip("\n")
        PAGE.write_text(f"{page}\n\n{HEAD}" + "\n".join(lines) + f"\n{REASONS}" + "\n".join(notes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
