"""Exactness on every family of timm: half of the units of each dependency group go, and the function stays.

    python benchmarks/families.py [module ...]      (default: all; resumes where it stopped)

Of each of timm's modules (``timm.list_modules()``) the smallest model is built, with random weights, statistics, affine
parameters and biases, in float64, and taken through what ``breadth.py`` does: the outputs of the masked and of the
compacted model are compared at two batch sizes, and inside by the engine's certificate. No model was looked at before a
rule was written for it: what stays whole, and why, is in the table as it came out. Results are kept, line by line, in
``build/families.jsonl``, by module and state of the code; the page is ``docs/families.md``.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.breadth import TOLERANCE, general, half_of_each_group, staying, supervise
from benchmarks.survey import ROOT, Survey, code_state
from tests.engine.exactness import differ, masked, parameters, randomised, relative_error, run

RESULTS = ROOT / "build" / "families.jsonl"
PAGE = ROOT / "docs" / "families.md"
CLASSES = 10


def smallest(module: str) -> tuple[int, str]:
    """Return the number of parameters and the name of the smallest model of a module."""
    sizes = []
    for name in timm.list_models(module=module):
        with torch.device("meta"):
            sizes.append((parameters(timm.create_model(name, num_classes=CLASSES)), name))
    return min(sizes)


def build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model in float64, everything in it random, and the shape of an image."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES)
    shape: tuple[int, ...] = tuple(model.pretrained_cfg["input_size"])
    return randomised(model.eval()), shape


def images(shape: Sequence[int], batch: int) -> Tensor:
    """Return random images."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)


def check(name: str) -> dict[str, Any]:
    """Compact a model and return what came of it.

    Raises:
        EngineError: where the engine refuses.
    """
    model, shape = build(name)
    return compacted(model, images(shape, 1), images(shape, 2), run)


def compacted(
    model: nn.Module, one: Any, two: Any, outputs: Callable[[nn.Module, Any], list[Tensor]]
) -> dict[str, Any]:
    """Mask half of the units of each dependency group of a model, compact it, and compare it with the masked one.

    Args:
        model: becomes small.
        one, two: inputs of two batch sizes.
        outputs: runs a model.
    """
    start = time.process_time()
    graph = engine.trace(model, one)
    groups = engine.dependency_groups(model, one, graph=graph)
    seconds = time.process_time() - start
    masks = half_of_each_group(model, groups)
    reference = masked(model, masks)
    expected = [outputs(reference, x) for x in (one, two)]
    changed = not masks or differ(outputs(model, one), expected[0])
    del reference
    macs = engine.count_flops_params(model, one, verbose=False, graph=graph)[0]
    predicted = engine.count_flops_params(model, one, verbose=False, masks=masks, graph=graph)
    before = parameters(model)
    start = time.process_time()
    speedup = engine.ModelSpeedup(model, one, masks, confidence=1, graph=graph)
    model = speedup.speedup_model()
    seconds += time.process_time() - start
    errors = [relative_error(old, outputs(model, x)) for old, x in zip(expected, (one, two), strict=True)]
    measured = engine.count_flops_params(model, one, verbose=False)
    return {
        "error": max(errors),
        "changed": changed,
        "parameters": [before, parameters(model)],
        "macs": [macs, measured[0]],
        "predicted": predicted[:2] == measured[:2],
        "seconds": round(seconds, 2),
        "stays": dict(Counter(general(g.reason) for g in groups if g.reason is not None)),
    }


def verdict(row: dict[str, Any]) -> str:
    """Return ``exact``, or why not."""
    if "refused" in row or "failed" in row:
        return general(" ".join(f"{key}: {row[key]}" for key in ("refused", "failed") if key in row))[:160]
    faults = [] if row["error"] <= TOLERANCE[torch.float64] else [f"relative error {row['error']:.1e}"]
    faults += [] if row["predicted"] else ["the counted sizes are not the measured ones"]
    faults += [] if row.get("changed", True) else ["the masks change nothing at the outputs"]
    return "; ".join(faults) or "exact"


HEAD = """# Survey of timm

We tested the smallest model in each of timm's modules: `python benchmarks/families.py` masks half of the units of each
dependency group, compacts the model, and compares it with the masked one. {exact} of {all} are exact. torch {torch},
timm {timm}, float64, on one CPU thread.

Everything that could hide an error is random. The error is the largest difference at two batch sizes, relative to the
largest entry of the output; the counted sizes equal the measured ones. MACs are per image, at the model's own input
size. Seconds are CPU time for tracing, planning, compacting and verifying.

| module | model | verdict | error | parameters, M | left | MACs, G | seconds |
|---|---|---|---:|---:|---:|---:|---:|
"""


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    start = f"| {row['module']} | {row['model']} | {verdict(row)} |"
    if "parameters" not in row:
        return f"{start} | {row['size'] / 1e6:.2f} | | | |"
    (before, after), (macs, fewer) = row["parameters"], row["macs"]
    return (
        f"{start} {row['error']:.0e} | {before / 1e6:.2f} → {after / 1e6:.2f} | {after / before:.0%} "
        f"| {macs / 1e9:.3f} → {fewer / 1e9:.3f} | {row['seconds']:.1f} |"
    )


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    exact = sum(verdict(row) == "exact" for row in rows)
    versions = {"torch": torch.__version__.split("+")[0], "timm": timm.__version__}
    head = HEAD.format(exact=exact, all=len(rows), **versions)
    return head + "\n".join([*map(line, rows), *staying(rows)]) + "\n"


def checked(module: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """Check the smallest model of a module, in a process of its own."""
    size, name = smallest(module)
    return {"model": name, "size": size} | supervise(check, name, seconds, gigabytes)


def main() -> int:
    """Run what has not been run yet, print each row, write the page, and return 1 if a model is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="module", help="names of timm's modules")
    parser.add_argument("--time", type=float, default=900, metavar="S", help="limit per model, default 900 s")
    parser.add_argument("--memory", type=float, default=12, metavar="GIB", help="limit per model, default 12 GiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    everything = [module for module in timm.list_modules() if timm.list_models(module=module)]
    if unknown := [module for module in args.modules if module not in everything]:
        parser.error(f"timm has no module {', '.join(unknown)}; it has {', '.join(everything)}")
    survey = Survey(RESULTS, "module", code_state(__file__, torch.__version__, timm.__version__))
    exact = True
    for module in args.modules or everything:
        row = survey.row(module, functools.partial(checked, module, args.time, args.memory))
        print(line(row), flush=True)
        exact &= verdict(row) == "exact"
    if (rows := survey.all(everything)) is not None:
        PAGE.write_text(page(rows))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
