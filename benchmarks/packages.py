"""Exactness on networks of other packages: half of the units of each dependency group go, and the function stays.

    python benchmarks/packages.py [network ...]      (default: all; resumes where it stopped)

Small networks of vit-pytorch (whose sizes einops works out), segmentation-models-pytorch and MONAI, as their authors
wrote them, in float64, everything in them random, are taken through what ``families.py`` does. Results are kept, line
by line, in ``build/packages.jsonl``, by network and state of the code; the page is ``docs/packages.md``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.breadth import staying, supervise
from benchmarks.families import compacted, verdict
from benchmarks.survey import ROOT, Survey, code_state
from tests.engine.exactness import randomised, run

RESULTS = ROOT / "build" / "packages.jsonl"
PAGE = ROOT / "docs" / "packages.md"
PACKAGES = ("vit-pytorch", "einops", "segmentation-models-pytorch", "monai")

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "heads": 4, "mlp_dim": 48, "dim_head": 8}
_STAGES = {
    f"s{n}_{name}": size
    for n, (dim, patch, local) in enumerate([(16, 4, 4), (24, 2, 4), (32, 2, 4), (32, 2, 2)], 1)
    for name, size in {
        "emb_dim": dim,
        "patch_size": patch,
        "local_patch_size": local,
        "global_k": local,
        "depth": 1,
    }.items()
}
_CVT = {f"s{n}_{k}": v for n, d in ((1, 16), (2, 24), (3, 32)) for k, v in (("emb_dim", d), ("heads", n), ("depth", 1))}
_CROSS = {
    f"{size}_{name}": value
    for size, dim, patch in (("sm", 16, 8), ("lg", 32, 16))
    for name, value in {
        "dim": dim,
        "patch_size": patch,
        "enc_depth": 1,
        "enc_heads": 2,
        "enc_mlp_dim": 24,
        "enc_dim_head": 8,
    }.items()
}
_CCT = {
    "img_size": (32, 32),
    "embedding_dim": 32,
    "n_conv_layers": 2,
    "kernel_size": 3,
    "stride": 2,
    "padding": 1,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
_MOBILE = {
    "image_size": (64, 64),
    "dims": [24, 32, 40],
    "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48],
    "num_classes": 5,
}
_MASKS = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}

Network = tuple[str, str, dict[str, Any], tuple[int, ...]]

NETWORKS: dict[str, Network] = {
    f"{package} {label}": (module, name, options, shape)
    for package, label, module, name, options, shape in [
        ("vit-pytorch", "ViT", "vit_pytorch", "ViT", _VIT | {"depth": 2}, (3, 32, 32)),
        ("vit-pytorch", "SimpleViT", "vit_pytorch", "SimpleViT", _VIT | {"depth": 2}, (3, 32, 32)),
        ("vit-pytorch", "DeepViT", "vit_pytorch.deepvit", "DeepViT", _VIT | {"depth": 2}, (3, 32, 32)),
        ("vit-pytorch", "CaiT", "vit_pytorch.cait", "CaiT", _VIT | {"depth": 2, "cls_depth": 1}, (3, 32, 32)),
        ("vit-pytorch", "PiT", "vit_pytorch.pit", "PiT", _VIT | {"depth": (1, 1)}, (3, 32, 32)),
        ("vit-pytorch", "XCiT", "vit_pytorch.xcit", "XCiT", _VIT | {"depth": 1, "cls_depth": 1}, (3, 32, 32)),
        ("vit-pytorch", "CCT", "vit_pytorch.cct", "CCT", _CCT, (3, 32, 32)),
        (
            "vit-pytorch",
            "CrossViT",
            "vit_pytorch.cross_vit",
            "CrossViT",
            _CROSS | {"image_size": 32, "num_classes": 5, "depth": 1, "cross_attn_depth": 1, "cross_attn_heads": 2},
            (3, 32, 32),
        ),
        (
            "vit-pytorch",
            "LeViT",
            "vit_pytorch.levit",
            "LeViT",
            {"image_size": 64, "num_classes": 5, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4)}
            | {"mlp_mult": 2, "dim_key": 8, "dim_value": 16},
            (3, 64, 64),
        ),
        ("vit-pytorch", "CvT", "vit_pytorch.cvt", "CvT", _CVT | {"num_classes": 5}, (3, 64, 64)),
        ("vit-pytorch", "Twins-SVT", "vit_pytorch.twins_svt", "TwinsSVT", _STAGES | {"num_classes": 5}, (3, 64, 64)),
        (
            "vit-pytorch",
            "MaxViT",
            "vit_pytorch.max_vit",
            "MaxViT",
            {"num_classes": 5, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4},
            (3, 64, 64),
        ),
        ("vit-pytorch", "MobileViT", "vit_pytorch.mobile_vit", "MobileViT", _MOBILE, (3, 64, 64)),
        *(
            ("segmentation-models-pytorch", label, "segmentation_models_pytorch", label, _MASKS | options, (3, 64, 64))
            for label, options in {
                "Unet": {"decoder_attention_type": "scse"},
                "UnetPlusPlus": {},
                "MAnet": {},
                "Linknet": {},
                "FPN": {},
                "PSPNet": {},
                "DeepLabV3Plus": {},
                "UPerNet": {},
                "Segformer": {"encoder_name": "mit_b0"},
            }.items()
        ),
        *(
            ("MONAI", name, "monai.networks.nets", name, _FLAT | options, shape)
            for name, options, shape in [
                ("BasicUNet", {"features": (8, 8, 16, 16, 24, 8)}, (1, 32, 32)),
                ("UNet", {"channels": (8, 16, 24), "strides": (2, 2), "num_res_units": 2}, (1, 32, 32)),
                ("AttentionUnet", {"channels": (8, 16, 24), "strides": (2, 2)}, (1, 32, 32)),
                ("SegResNet", {"init_filters": 8}, (1, 32, 32)),
                ("VNet", {}, (1, 32, 32)),
                ("HighResNet", {}, (1, 32, 32)),
                (
                    "UNETR",
                    {"img_size": (32, 32), "feature_size": 8, "hidden_size": 32, "mlp_dim": 48, "num_heads": 4},
                    (1, 32, 32),
                ),
                ("SwinUNETR", {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}, (1, 64, 64)),
            ]
        ),
    ]
}


def build(key: str) -> nn.Module:
    """Return a network in float64, everything in it random."""
    module, name, options, _ = NETWORKS[key]
    torch.manual_seed(0)
    return randomised(getattr(importlib.import_module(module), name)(**options).eval())


def images(key: str, batch: int) -> Tensor:
    """Return random images."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, *NETWORKS[key][3], generator=generator, dtype=torch.float64)


def check(key: str) -> dict[str, Any]:
    """Compact a network and return what came of it.

    Raises:
        EngineError: where the engine refuses.
    """
    return compacted(build(key), images(key, 1), images(key, 2), run)


HEAD = """# Survey of other packages

`python benchmarks/packages.py` builds small networks of packages that people prune, masks half of the units of each
dependency group, compacts the network, and compares it with the masked one: {exact} of {all} are exact.
torch {torch}, {packages}, float64, on one CPU thread.

Everything that could hide an error is random. The error is the largest difference at two batch sizes, relative to the
largest entry of the output; the counted sizes equal the measured ones. The certificate also compares inside the
network, and at a larger resolution if the network accepts one. Seconds are CPU time for tracing, planning, compacting
and verifying.

| network | verdict | error | parameters, k | left | seconds |
|---|---|---:|---:|---:|---:|
"""


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    start = f"| {row['network']} | {verdict(row)} |"
    if "parameters" not in row:
        return f"{start} | | | |"
    before, after = row["parameters"]
    sizes = f"{before / 1e3:.0f} → {after / 1e3:.0f} | {after / before:.0%}"
    return f"{start} {row['error']:.0e} | {sizes} | {row['seconds']:.1f} |"


def page(rows: Sequence[dict[str, Any]], versions: Sequence[str]) -> str:
    """Return the page."""
    exact = sum(verdict(row) == "exact" for row in rows)
    torch_version = torch.__version__.split("+")[0]
    head = HEAD.format(exact=exact, all=len(rows), torch=torch_version, packages=", ".join(versions))
    return head + "\n".join([*map(line, rows), *staying(rows)]) + "\n"


def main() -> int:
    """Run what has not been run yet, print each row, write the page, and return 1 if a network is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help="such as 'vit-pytorch ViT'")
    parser.add_argument("--time", type=float, default=120, metavar="S", help="limit per network, default 120 s")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB", help="limit per network, default 8 GiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if unknown := [key for key in args.networks if key not in NETWORKS]:
        parser.error(f"There is no network {', '.join(unknown)}; there are {', '.join(NETWORKS)}.")
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    survey = Survey(RESULTS, "network", code_state(__file__, torch.__version__, *versions))
    exact = True
    for key in args.networks or NETWORKS:
        row = survey.row(key, functools.partial(supervise, check, key, args.time, args.memory))
        print(line(row), flush=True)
        exact &= verdict(row) == "exact"
    if (rows := survey.all(list(NETWORKS))) is not None:
        PAGE.write_text(page(rows, versions))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
