"""Latency of dense, masked and compacted networks on a CUDA device: writes ``docs/gpu.md``.

    python benchmarks/gpu.py [--device cuda] [--models resnet50 …] [--batch 1 64] [--ways eager …] [--out docs/gpu.md]

Two tables. The first is the one of NNI's page on speedup: a VGG and a residual network on 32 × 32 pictures, batch 64,
masked against compacted, for 1 to 32 forward passes. The second holds networks of torchvision in two dtypes and two
batch sizes, as they are, in channels-last memory format, and compiled. Half of the units of each dependency group are
masked, those with the smallest weights (of a vision transformer, heads and neurons). All are timed in turns, so that a
drift of the clock or of the load hits all alike; medians are shown.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.narrow import group_wise

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("resnet50", "mobilenet_v2", "vit_b_16", "swin_t")
REPETITIONS = (1, 2, 4, 8, 16, 32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("dense", "masked", "compacted")

Way = Callable[[nn.Module], Callable[[Tensor], object]]


def _channels_last(model: nn.Module) -> Callable[[Tensor], object]:
    copied = copy.deepcopy(model).to(memory_format=torch.channels_last)
    return lambda x: copied(x.contiguous(memory_format=torch.channels_last))


WAYS: dict[str, Way] = {
    "eager": lambda model: model,
    "channels_last": _channels_last,
    "compiled": lambda model: torch.compile(copy.deepcopy(model), dynamic=False),
}


def _vgg() -> nn.Module:
    """VGG-19 for small pictures: one linear layer behind the features."""
    features = torchvision.models.vgg19_bn(weights=None).features
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "VGG-19": _vgg,
    "ResNet-18": lambda: torchvision.models.resnet18(weights=None, num_classes=10),
}


def networks(dense: nn.Module, image: Tensor) -> dict[str, nn.Module]:
    """Return the dense, the masked and the compacted network."""
    masks = group_wise(dense, image)
    masked = copy.deepcopy(dense)
    with torch.no_grad():
        for module, entries in masks.items():
            for key, mask in entries.items():
                getattr(masked.get_submodule(module), key).mul_(mask.to(image.device))
    compacted = engine.ModelSpeedup(copy.deepcopy(dense), image, masks, confidence=2).speedup_model()
    return dict(zip(KINDS, (dense, masked, compacted), strict=True))


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


def latencies(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median latency of each call in milliseconds, timed in turns; the first turns warm up."""
    measure, times = timer(device), {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(rounds + 3):
            for name, call in calls.items():
                elapsed = measure(call)
                if turn >= 3:
                    times[name].append(elapsed)
    return {name: median(seconds) for name, seconds in times.items()}


def _repeated(call: Callable[[Tensor], object], images: Tensor, times: int) -> None:
    for _ in range(times):
        call(images)


def small_networks(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Yield the rows of the first table."""
    for name, make in SMALL.items():
        torch.manual_seed(0)
        models = networks(make().to(device).eval(), torch.randn(2, 3, 32, 32, device=device))
        images = torch.randn(args.small_batch, 3, 32, 32, device=device)
        for times in args.repetitions:
            calls = {kind: functools.partial(_repeated, models[kind], images, times) for kind in KINDS[1:]}
            masked, compacted = latencies(calls, device, args.rounds).values()
            yield f"| {name} | {times} | {masked:.2f} | {compacted:.2f} | {masked / compacted:.2f} |"


def large_networks(args: argparse.Namespace, device: torch.device, failures: list[str]) -> Iterator[str]:
    """Yield the rows of the second table; what cannot be run is named in ``failures``."""
    for name in args.models:
        torch.manual_seed(0)
        dense = getattr(torchvision.models, name)(weights=None).to(device).eval()
        variants = networks(dense, torch.randn(2, 3, args.size, args.size, device=device))
        for kind in args.dtypes:
            models = {k: copy.deepcopy(m).to(DTYPES[kind]) for k, m in variants.items()}
            for batch in args.batch:
                images = torch.randn(batch, 3, args.size, args.size, device=device, dtype=DTYPES[kind])
                for way in args.ways:
                    yield _row(models, images, way, args, f"{name} | {kind} | {batch} | {way}", failures)


def _row(
    models: Mapping[str, nn.Module], images: Tensor, way: str, args: argparse.Namespace, what: str, failures: list[str]
) -> str:
    try:
        calls = {kind: functools.partial(WAYS[way](model), images) for kind, model in models.items()}
        times = latencies(calls, images.device, args.rounds)
    except Exception as error:  # a compiler that is not there, or an op that a dtype does not have: said on the page
        failures.append(f"{what.replace(' | ', ', ')}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return f"| {what} | – | – | – | – |"
    cells = " | ".join(f"{times[kind]:.2f}" for kind in KINDS)
    return f"| {what} | {cells} | {times['dense'] / times['compacted']:.2f} |"


def page(args: argparse.Namespace, device: torch.device) -> str:
    """Measure, and return the page."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    failures: list[str] = []
    lines = [
        f"# Latency on {card}",
        "",
        f"Written by `python benchmarks/gpu.py`: median milliseconds over {args.rounds} rounds, torch "
        f"{torch.__version__}. "
        "Half of the units of each dependency group are masked; the compacted network is without them.",
        "",
        f"## Small images: 32 × 32, batch {args.small_batch}, float32",
        "",
        "| network | forward passes | masked | compacted | masked / compacted |",
        "|---|---:|---:|---:|---:|",
        *small_networks(args, device),
        "",
        f"## torchvision: {args.size} × {args.size}",
        "",
        "| network | dtype | batch | way | dense | masked | compacted | dense / compacted |",
        "|---|---|---:|---|---:|---:|---:|---:|",
        *large_networks(args, device, failures),
        "",
    ]
    if failures:
        lines += ["Not run:", "", *(f"- {failure}" for failure in failures), ""]
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where to measure")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names of torchvision models")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="batch sizes")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--small-batch", type=int, default=64, help="batch size of the small images")
    parser.add_argument("--repetitions", nargs="*", type=int, default=list(REPETITIONS), help="forward passes")
    parser.add_argument("--rounds", type=int, default=30, help="timed turns")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md", help="file to write the page to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and write the page."""
    args = arguments(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here; pass --device cpu --out FILE to measure on the processor.")
        return 1
    args.out.write_text(page(args, device))
    print(f"Written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
