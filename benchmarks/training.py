"""How much faster a training becomes once what is masked is removed while it goes on, as Markdown.

    python benchmarks/training.py [--device cpu] [--size 64] [--batch 32] [--pairs 30] [--model resnet18] [--clock wall]

Two fits run in turns, step by step. Both mask the same half of all channels after as many steps; one of them then
compacts, the other trains on with the masks. "before" are the steps before that, where the ratio shows the noise;
"after" those after it. On a CPU that others use as well, ``--clock cpu`` counts the time that this process got.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import warnings
from pathlib import Path
from statistics import median, quantiles

import torch
from pytorch_lightning import Callback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.overhead import CLOCKS, WARM_UP, Classifier, Paced, Turns, clock_of, fit
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction


def callbacks(options: argparse.Namespace, compact: bool) -> list[Callback]:
    """Masks at one step; compacted before the next one, or not at all."""
    step = WARM_UP + options.pairs
    pruning = ChannelPruning(amount=options.amount, unit="step", schedule="one_shot", start=step, end=step)
    removal = [ModelCompaction(when=0.01, save=False, on_failure="raise")] if compact else []
    return [pruning, MaskConflictRepair(), *removal]


def run(options: argparse.Namespace) -> tuple[list[list[float]], list[int]]:
    """Seconds of each step and parameters at the end, of the masked and of the compacted fit."""
    turns, device = Turns(2), torch.device(options.device)
    batch = (torch.randn(options.batch, 3, options.size, options.size), torch.arange(options.batch) % 1000)
    # One step more masks, and one compacts.
    steps = 2 * (options.pairs + WARM_UP) + 1
    loaders = [Paced(batch, steps, turns, place, clock_of(device, options.clock)) for place in range(2)]
    modules = [Classifier(options.model, options.size) for _ in loaders]
    threads = [
        threading.Thread(target=fit, args=(module, loader, callbacks(options, compact), device.type, turns))
        for module, loader, compact in zip(modules, loaders, (False, True), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failure is not None:
        raise turns.failure
    return [loader.seconds for loader in loaders], [sum(p.numel() for p in module.parameters()) for module in modules]


def report(options: argparse.Namespace) -> str:
    """The table."""
    (masked, compacted), sizes = run(options)
    first = WARM_UP + options.pairs
    parts = {"before": slice(WARM_UP, first - 1), "after": slice(first + WARM_UP, None)}
    rows = ["| steps | masked, ms | compacted, ms | ratio, median (quartiles) |", "|---|---|---|---|"]
    for name, part in parts.items():
        ratios = [b / a for a, b in zip(masked[part], compacted[part], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        times = [f"{1e3 * median(seconds[part]):.1f}" for seconds in (masked, compacted)]
        rows.append(f"| {name} | {times[0]} | {times[1]} | {middle:.3f} ({low:.3f}–{high:.3f}) |")
    pause = sum(compacted[first - 1 : first + WARM_UP]) - sum(masked[first - 1 : first + WARM_UP])
    setting = f"{options.model}, {options.size} px, batch {options.batch}, {options.device}, {options.clock} time"
    end = f"Parameters: {sizes[0]:,} masked, {sizes[1]:,} compacted. The compaction took {pause:.1f} s, once."
    return "\n".join([f"{setting}, {options.pairs} pairs\n", *rows, f"\n{end}"])


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--amount", type=float, default=0.5)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    options = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(report(options))


if __name__ == "__main__":
    main()
