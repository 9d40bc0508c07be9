"""Plain source of whole networks of torchvision: written by `save_stock`, imported where this project is not.

    python benchmarks/sources.py [network ...]

Half of each dependency group is removed from the network, in its real size and at a small resolution. The file is
imported in a process that can import neither this project nor torchvision, loads its weights strictly, and gives the
same bits on other images; ruff checks it; it is exported to ONNX, and onnxruntime compared with it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from lightning_compress import save_stock
from lightning_compress.checkpoints.export import export_onnx
from lightning_compress.stock.source import imported

NETWORKS = {"resnet50": 64, "mobilenet_v3_large": 64, "vit_b_16": 224, "convnext_tiny": 64, "swin_t": 64}

RUN = """
import sys, torch
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("engine", "lightning_compress", "torchvision"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
torch.set_num_threads(1)  # on more, sums are taken in another order
from safetensors.torch import load_file
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    import network
    model = network.Network()
    model.load_state_dict(load_file(folder + "/network.safetensors"), strict=True)
    inputs, outputs = torch.load(folder + "/check.pt")
    with torch.no_grad():
        print(torch.equal(model.eval()(inputs), outputs))
    sys.path.pop(0), sys.modules.pop("network")
"""
"""Compares the networks in some folders with what is stored beside them, where none of this project can be imported."""


def without_zeros(model: nn.Module) -> nn.Module:
    """Make weights random that a network starts with at zero, as a last layer: its outputs would say nothing."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def check(name: str, folder: Path) -> str:
    """Return a row of the table."""
    torch.manual_seed(0)
    model, side = without_zeros(torchvision.models.get_model(name).eval()), NETWORKS[name]
    x = torch.randn(2, 3, side, side)
    before = sum(p.numel() for p in model.parameters())
    groups = [group for group in engine.dependency_groups(model, x) if group.reason is None]
    masks = engine.group_masks(groups, {g.name: torch.arange(g.size) < (g.size + 1) // 2 for g in groups})
    engine.ModelSpeedup(model, x, masks, confidence=0).speedup_model()
    path = save_stock(model, folder / name, example_input=x, constructor=False)
    others = torch.randn(3, 3, side, side)
    with torch.no_grad():
        torch.save((others, model(others)), folder / name / "check.pt")
    script = folder / "run.py"
    script.write_text(RUN)
    command = [sys.executable, "-I", str(script), str(folder / name)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    ruff = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", str(path)], capture_output=True)
    network = imported(path).Network().eval()
    network.load_state_dict(load_file(path.with_name("network.safetensors")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = export_onnx(network, folder / f"{name}.onnx", x)
    after, lines = sum(p.numel() for p in model.parameters()), len(path.read_text().splitlines())
    equal = run.stdout.strip() or run.stderr.strip()[-200:]
    passes = "passes" if ruff.returncode == 0 else "fails"
    sizes = f"{before / 1e6:.1f} → {after / 1e6:.1f}"
    return f"| {name} | {side} | {sizes} | {lines} | {'equal' if equal == 'True' else equal} | {passes} | {error:.0e} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NETWORKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | pixels | parameters, M | lines | other process | ruff | ONNX, error |")
    print("|---|---:|---:|---:|---|---|---:|")
    for name in args.networks or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            print(check(name, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
