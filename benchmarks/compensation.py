"""Least squares on every classifier of torchvision and the smallest model of each of timm's modules.

    python benchmarks/compensation.py [torchvision:NAME | timm:MODULE ...]      (default: all; resumes where it stopped)

Half of the units of each dependency group are masked, and `engine.compensate` is given 32 random inputs. On 32 fresh
ones, the dense model is compared with the masked model and with the compensated one: at the outputs of the compensated
layers or, where such an output is added to something else, at the sum; where a layer has no bias, so that the mean of
the norm behind it is fitted instead, at the output of that norm; and at the outputs of the model. Then the
compensated model is compacted, and compared with itself. Weights and statistics are random, in float64 (in float32
above 300 million parameters), images of 64 x 64 where the model takes them. Results are kept, line by line, in
``build/compensation.jsonl``, by model and state of the code; the page is ``docs/compensation.md``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.breadth import LARGE, TOLERANCE, general, half_of_each_group, supervise
from benchmarks.survey import ROOT, Survey, code_state
from engine.compaction.build import canonical_tensors
from engine.compensation.interpreter import Run, first_path
from engine.compensation.readers import sums
from engine.program.graph import Node
from tests.engine import zoo
from tests.engine.exactness import masked, parameters, randomised, relative_error, run

RESULTS = ROOT / "build" / "compensation.jsonl"
PAGE = ROOT / "docs" / "compensation.md"
SAMPLES, BATCH = 32, 8
SIDE = 64  # pixels
WORSE = 1.01  # how much larger the error of the outputs may become

Row = dict[str, Any]


# ---------------------------------------------------------------- the models


def names() -> list[str]:
    """Return the names of all models: torchvision's by their own, timm's by their module."""
    try:
        import timm
    except ModuleNotFoundError:
        modules = []
    else:
        modules = [module for module in timm.list_modules() if timm.list_models(module=module)]
    return [f"torchvision:{name}" for name in zoo.names("classification")] + [f"timm:{name}" for name in modules]


def build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model with everything in it random, and the shape of an image."""
    package, _, name = name.partition(":")
    if package == "torchvision":
        dtype = torch.float32 if zoo.published_size(name) > LARGE else torch.float64
        return zoo.build(name, dtype), (3, zoo.recipe(name).size, zoo.recipe(name).size)
    from benchmarks import families

    for size in ({"img_size": SIDE}, {}):
        torch.manual_seed(0)
        try:
            model = families.timm.create_model(families.smallest(name)[1], num_classes=families.CLASSES, **size)
        except (TypeError, AssertionError, ValueError, RuntimeError):
            continue  # it is of one size
        model = randomised(model.eval(), dtype=torch.float32 if parameters(model) > LARGE else torch.float64)
        channels, *published = model.pretrained_cfg["input_size"]
        small = (channels, *(min(SIDE, side) for side in published))
        if takes(model, small):
            return model.train().eval(), small  # without what it keeps of the call
    return model.train().eval(), (channels, *published)


def takes(model: nn.Module, shape: Sequence[int]) -> bool:
    """Whether a model runs on images of a shape."""
    try:
        run(model, torch.zeros(2, *shape, dtype=next(model.parameters()).dtype))
    except (RuntimeError, AssertionError, ValueError, IndexError):
        return False
    return True


# ---------------------------------------------------------------- one model


def compared(graph: engine.Graph, layers: Container[str]) -> list[Any]:
    """Return the values that are compared: the outputs of some layers, or the sums that they go into."""
    users, outputs = graph.users(), {value.index for value in graph.outputs}
    values = []
    for node in first_path(graph):
        if node.module in layers and any(value.name and len(value.shape) > 1 for value in node.inputs):
            _, end, _ = next(sums(node, users, outputs), ((), _shifted(node, users), None))
            values.append(end.output)
    return values


def _shifted(node: Node, users: dict[int, list[Node]]) -> Node:
    """Return the node behind which the shift that was fitted counts: this one, or the norm behind it."""
    readers = users.get(node.output.index, [])
    if not _reads_vectors(node) and len(readers) == 1 and _reads_vectors(readers[0]):
        return readers[0]
    return node


def _reads_vectors(node: Node) -> bool:
    """Whether a node reads parameters or buffers of one dimension, such as a bias or running means."""
    return any(value.name and len(value.shape) == 1 for value in node.inputs)


def inside(graph: engine.Graph, model: nn.Module, values: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Run the recorded program with the weights of a model, and return these values."""
    with torch.no_grad():
        program = Run(graph, canonical_tensors(model, graph), [x], {value.index: 1 for value in values})
        for node in first_path(graph):
            program.step(node)
    return [program[value] for value in values]


def distances(
    models: Sequence[nn.Module], batches: Sequence[Tensor], compute: Callable[[nn.Module, Tensor], list[Tensor]]
) -> list[float]:
    """Return, for each model but the first, the squared differences from the first, relative to its squares.

    Batch by batch, because the values inside of a network take much memory.
    """
    sums, scale = [0.0] * (len(models) - 1), 0.0
    for x in batches:
        target, *others = (compute(model, x) for model in models)
        scale += sum(float(one.double().square().sum()) for one in target)
        for place, values in enumerate(others):
            pairs = zip(target, values, strict=True)
            sums[place] += sum(float((one.double() - other).square().sum()) for one, other in pairs)
    return [total / (scale or 1.0) for total in sums]


def check(name: str) -> Row:
    """Mask half of a model, compensate it, compact it, and return the errors.

    Raises:
        EngineError: where the engine refuses.
    """
    model, shape = build(name)
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * SAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype)
    batches, fresh = images[:SAMPLES].split(BATCH), images[SAMPLES:].split(BATCH)
    graph = engine.trace(model, images[:2])
    masks = half_of_each_group(model, engine.dependency_groups(model, images[:2], graph=graph))
    dense = copy.deepcopy(model)
    start = time.process_time()
    report = engine.compensate(model, images[:2], masks, batches, samples=SAMPLES, graph=graph)
    seconds = time.process_time() - start
    layers = sorted({layer for row in report.values() for layer in row.layers})
    values = compared(graph, layers)
    models = (dense, masked(dense, masks), masked(model, masks))
    inner = distances(models, fresh, lambda net, x: inside(graph, net, values, x))
    outer = distances(models, fresh, run)
    after = [run(models[-1], x) for x in fresh]
    macs = engine.count_flops_params(model, images[:2], verbose=False, masks=masks, graph=graph)[:2]
    small = engine.ModelSpeedup(model, images[:2], masks, confidence=0, graph=graph).speedup_model()
    measured = engine.count_flops_params(small, images[:2], verbose=False)[:2]
    return {
        "layers": [len(layers), sum(len(row.skipped) for row in report.values())],
        "inner": inner,
        "outer": outer,
        "error": max(relative_error(old, run(small, x)) for old, x in zip(after, fresh, strict=True)),
        "tolerance": TOLERANCE[dtype],
        "predicted": macs == measured,
        "seconds": round(seconds, 2),
        "skipped": sorted({general(why) for row in report.values() for why in row.skipped.values()}),
    }


# ---------------------------------------------------------------- all of them


def objections(row: Row) -> list[str]:
    """Return what a row does not hold."""
    if "refused" in row or "failed" in row:
        return [general(" ".join(f"{key}: {row[key]}" for key in ("refused", "failed") if key in row))[:160]]
    (inner, inner_after), (outer, outer_after) = row["inner"], row["outer"]
    checks = {
        "the error of the layers rises": inner_after > inner,
        "the error of the outputs rises": outer_after > WORSE * outer,
        f"compaction is {row['error']:.0e} off": row["error"] > row["tolerance"],
        "the counted sizes are not the measured ones": not row["predicted"],
    }
    return [text for text, fails in checks.items() if fails]


HEAD = """# Survey of compensation

`python benchmarks/compensation.py` masks half of the units of each dependency group in every classifier of torchvision
and in the smallest model of each of timm's modules, and calls `engine.compensate` with {samples} random inputs. On
{samples} fresh inputs, the squared error against the dense model, at the outputs of the compensated layers (behind the
norm, where its mean is fitted in place of a bias), falls in {inner} of {all} models; at the outputs of the model it
rises by more than 1 % in {worse}. Compacted, {exact} of {all} compute the same function as before, and {counted} of
{all} have the sizes that were counted beforehand. torch {torch}, float64 (float32 above 300 million parameters),
64 x 64 images where the model takes them, one CPU thread.{missing}

Weights are random, so that nothing is to be learned here about accuracy: [Results](results.md) has that. Errors are
relative to the squared values of the dense model. Many of these networks return nearly the same for every random
image, which makes the error of their outputs tiny once it is fitted; the error of the layers says more. A row is kept
until its model is run again, so that rows may be of several commits; the largest models take up to 19 GiB
(`--memory 19`).

| model | layers fitted (left) | error of the layers | error of the outputs | compaction | seconds | |
|---|---:|---:|---:|---:|---:|---|
"""

MISSING = """

**Not measured yet: {missing} models.** The rows below are of {states} states of the code."""


def line(row: Row) -> str:
    """Return a row of the table."""
    text = "; ".join(objections(row))
    if "inner" not in row:
        return f"| {row['model']} | | | | | | {text} |"
    (layers, left), (inner, inner_after), (outer, outer_after) = row["layers"], row["inner"], row["outer"]
    return (
        f"| {row['model']} | {layers} ({left}) | {inner:.3g} → {inner_after:.3g} | {outer:.3g} → {outer_after:.3g} "
        f"| {row['error']:.0e} | {row['seconds']:.1f} | {text} |"
    )


def page(rows: Sequence[Row], missing: int = 0) -> str:
    """Return the page of rows, where a number of models is missing."""
    measured = [row for row in rows if "inner" in row]
    numbers = {
        "samples": SAMPLES,
        "all": len(rows),
        "inner": sum(row["inner"][1] < row["inner"][0] for row in measured),
        "worse": sum(row["outer"][1] > WORSE * row["outer"][0] for row in measured),
        "exact": sum(row["error"] <= row["tolerance"] for row in measured),
        "counted": sum(row["predicted"] for row in measured),
        "torch": torch.__version__.split("+")[0],
        "missing": MISSING.format(missing=missing, states=len({row["state"] for row in rows})) if missing else "",
    }
    reasons = sorted({why for row in measured for why in row["skipped"]})
    tail = ["", "## Layers that are left as they are, and why", "", *(f"- {why}" for why in reasons)] if reasons else []
    return HEAD.format(**numbers) + "\n".join([*map(line, rows), *tail]) + "\n"


def main() -> int:
    """Run what has not been run yet, print each row, and write the page of all; return 1 where one has objections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="PACKAGE:NAME", help="models of torchvision, modules of timm")
    parser.add_argument("--time", type=float, default=900, metavar="S", help="limit per model, default 900 s")
    parser.add_argument("--memory", type=float, default=12, metavar="GIB", help="limit per model, default 12 GiB")
    parser.add_argument("--finished", action="store_true", help="measure nothing, write what any state has measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    everything = names()
    if unknown := [name for name in args.models if name not in everything]:
        parser.error(f"no model is named {', '.join(unknown)}; the first ones are {', '.join(everything[:5])}")
    survey = Survey(RESULTS, "model", code_state(__file__, torch.__version__), args.finished)
    if args.finished:
        rows = [row for name in everything if (row := survey.stored(name)) is not None]
        PAGE.write_text(page(rows, len(everything) - len(rows)))
        return int(any(map(objections, rows)))
    fails = False
    for name in args.models or everything:
        row = survey.row(name, functools.partial(supervise, check, name, args.time, args.memory))
        print(line(row), flush=True)
        fails |= bool(objections(row))
    if (rows := survey.all(everything)) is not None:
        PAGE.write_text(page(rows))
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
