"""Latency of dense, masked and compacted networks on a CUDA device, as Markdown.

    python benchmarks/gpu.py [--device cuda] [--models resnet18 …] [--batch 1 64] [--out docs/gpu.md]

Half of the units of each dependency group are masked, those with the smallest weights. The masked network has zeros
where units are masked, the compacted one has lost them. The three are timed in turns, so that a drift of the clock or
of the load hits all alike; medians are shown.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.breadth import group_wise

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "convnext_tiny")


def networks(name: str, device: torch.device, dtype: torch.dtype, size: int) -> dict[str, nn.Module]:
    """Return the dense, the masked and the compacted network."""
    torch.manual_seed(0)
    dense = getattr(torchvision.models, name)(weights=None).to(device).eval()
    image = torch.randn(2, 3, size, size, device=device)
    masks = group_wise(dense, image)
    masked = copy.deepcopy(dense)
    with torch.no_grad():
        for module, entries in masks.items():
            for key, mask in entries.items():
                getattr(masked.get_submodule(module), key).mul_(mask.to(device))
    speedup = engine.ModelSpeedup(copy.deepcopy(dense), image, masks, confidence=2)
    compacted = speedup.speedup_model()
    return {n: m.to(dtype) for n, m in {"dense": dense, "masked": masked, "compacted": compacted}.items()}


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that times a call in milliseconds, device work included."""

    def on_cuda(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def on_cpu(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)

    return on_cuda if device.type == "cuda" else on_cpu


def latencies(models: dict[str, nn.Module], images: Tensor, rounds: int) -> dict[str, float]:
    """Return the median latency of each network in milliseconds, timed in turns."""
    measure, times = timer(images.device), {name: [] for name in models}
    with torch.inference_mode():
        for turn in range(rounds + 3):
            for name, model in models.items():
                elapsed = measure(lambda model=model: model(images))
                if turn >= 3:  # the first turns warm up
                    times[name].append(elapsed)
    return {name: median(found) for name, found in times.items()}


def rows(args: argparse.Namespace) -> list[str]:
    """Return one table row per network, dtype and batch size."""
    device = torch.device(args.device)
    lines = []
    for name in args.models:
        for dtype in (torch.float32, torch.bfloat16):
            models = networks(name, device, dtype, args.size)
            for batch in args.batch:
                images = torch.randn(batch, 3, args.size, args.size, device=device, dtype=dtype)
                found = latencies(models, images, args.rounds)
                kind = str(dtype).removeprefix("torch.")
                cells = [f"{found[key]:.2f}" for key in ("dense", "masked", "compacted")]
                ratio = found["masked"] / found["compacted"]
                lines.append(f"| {name} | {kind} | {batch} | {' | '.join(cells)} | {ratio:.2f} |")
                print(lines[-1], flush=True)
    return lines


def main() -> int:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where to measure")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names of torchvision models")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="batch sizes")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--rounds", type=int, default=30, help="timed turns")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("No CUDA device here; pass --device cpu to measure on the processor.")
        return 1
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else "the processor"
    removed = "half of the units of each group removed"
    head = [
        f"Median latency in milliseconds on {card}, torch {torch.__version__}; {removed}.",
        "",
        "| network | dtype | batch | dense | masked | compacted | masked / compacted |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(head))
    table = "\n".join([*head, *rows(args)]) + "\n"
    if args.out is not None:
        args.out.write_text(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
