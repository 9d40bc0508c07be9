"""Exactness on every model of torchvision: half of the units of each dependency group go, and the function stays.

    python benchmarks/breadth.py [model ...]      (default: all; resumes where it stopped)
    python benchmarks/breadth.py --quick          (one model of each architecture)
    python benchmarks/breadth.py --masks          (four kinds of masks on convolutional networks: breadth_masks.py)

Each model runs in a process of its own with limits on time and memory, in float64 (in float32 above 300 million
parameters), with random statistics, affine parameters, biases, tokens and tables. Masked are half of the units of each
dependency group: channels, neurons, heads, the residual stream; one unit stays at least. Compared with the masked model
are the outputs at two batch sizes and, where the model takes one, a second resolution, and (by the engine's own
certificate) the inner outputs of norms and contractions. A detector is compared by the outputs of its heads, before
thresholds and suppression. Then the compacted model runs forward and backward in train mode.

The result is *exact*, *refused* (the engine raised an error that says why and left the model alone) or *failed*.
Results are kept, line by line, in ``build/breadth.jsonl``, by model and state of the code; a table goes to
``docs/breadth.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what torch imports at the first call of some modules: once, not in each process
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from engine.program.trees import tensors_in
from engine.sensitivity.importance import cut, l1, unit_rows
from tests.engine import zoo
from tests.engine.exactness import Masks, masked, parameters, relative_error

ROOT = Path(__file__).resolve().parents[1]
LARGE = 300_000_000
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SMALLER = 0.45  # of the parameters of a classification model
RESULTS = ROOT / "build" / "breadth.jsonl"
PAGE = ROOT / "docs" / "breadth.md"
Check = Callable[[str], dict[str, Any]]


# ---------------------------------------------------------------- one model


def dtype_of(name: str) -> torch.dtype:
    """Return float64, or float32 for a large model."""
    return torch.float32 if zoo.published_size(name) > LARGE else torch.float64


def half_of_each_group(model: nn.Module, groups: Iterable[engine.Group]) -> Masks:
    """Mask the units of each dependency group that have the smallest weights."""
    keep = {g.name: cut(l1(unit_rows(g, model.get_parameter)), 0.5, g.rows) for g in groups if g.reason is None}
    return engine.group_masks(groups, keep)


def others(name: str, dtype: torch.dtype) -> list[Any]:
    """Return inputs of two batch sizes, and of a second resolution where the model takes one."""
    recipe = zoo.recipe(name)
    small, large = recipe.batches
    examples = [zoo.example(name, batch, recipe.size, dtype) for batch in (small, large)]
    return [*examples, zoo.example(name, small, recipe.larger, dtype)] if recipe.larger else examples


def reference_outputs(model: nn.Module, name: str, masks: Masks, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the outputs of the masked model; until then, only one more copy of it exists."""
    model = masked(model, masks)
    return [zoo.outputs(model, x) for x in others(name, dtype)]


def trains(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Run forward and backward in train mode; what has no gradient then had none before."""
    recipe = zoo.recipe(name)
    model.train()
    inputs = zoo.example(name, 2, recipe.size, dtype)
    if zoo.task_of(name) == "detection":
        inputs = (*inputs, zoo.targets(2, recipe.size, dtype))
    out = [t for t in tensors_in(zoo.call(model, inputs)) if t.requires_grad]
    torch.stack([t.sum() for t in out]).sum().backward()
    if not any(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()):
        raise AssertionError("no finite gradient after compaction")


def check(name: str) -> dict[str, Any]:
    """Compact a model and return what came of it.

    Raises:
        EngineError: where the engine refuses.
    """
    dtype = dtype_of(name)
    if zoo.task_of(name) == "optical_flow":
        torch.set_default_dtype(dtype)  # it makes its coordinates in that
    model = zoo.build(name, dtype)
    images = zoo.example(name, zoo.recipe(name).batches[0], zoo.recipe(name).size, dtype)
    start = time.process_time()
    graph = engine.trace(model, images)
    groups = engine.dependency_groups(model, images, graph=graph)
    analysed = time.process_time() - start
    masks = half_of_each_group(model, groups)
    reference = reference_outputs(model, name, masks, dtype)
    whole = engine.count_flops_params(model, images, verbose=False, graph=graph)
    predicted = engine.count_flops_params(model, images, verbose=False, masks=masks, graph=graph)
    before = parameters(model)
    start = time.process_time()
    speedup = engine.ModelSpeedup(model, images, masks, confidence=2, graph=graph)
    model = speedup.speedup_model()
    seconds = analysed + time.process_time() - start
    errors = [relative_error(old, zoo.outputs(model, x)) for old, x in zip(reference, others(name, dtype), strict=True)]
    measured = engine.count_flops_params(model, images, verbose=False)
    trains(model, name, dtype)
    return {
        "error": max(errors),
        "tolerance": TOLERANCE[dtype],
        "certificate": speedup.certificate.max_error,
        "parameters": [before, parameters(model)],
        "macs": [whole[0], measured[0]],
        "predicted": predicted[:2] == measured[:2],
        "seconds": round(seconds, 2),
        "stays": dict(Counter(general(g.reason) for g in groups if g.reason is not None)),
        "notes": list(speedup.certificate.notes),
    }


def general(reason: str) -> str:
    """Return a reason without what tells one layer, or one computer, from the next."""
    reason = re.sub(r"/\S*/site-packages/| in '[^']*'", "", reason)
    written_by_packages = rf"{re.escape(tempfile.gettempdir())}/(\S+)_\w{{8}}(?=\.py)"
    reason = re.sub(written_by_packages, r"\1", reason)
    return re.sub(r"(?<=[\w\])]) = [\d.#]+|(?<=\.py):[\d#]+", "", reason)


def child(check: Check, name: str, seconds: float, gigabytes: float, sender: Connection) -> None:
    """Check one model under limits of CPU time and memory, and send the row."""
    limit, time_limit = int(gigabytes * 2**30), math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (time_limit, time_limit + 5))
    torch.set_num_threads(1)  # in this process: the threads of autograd fail on a pool from before the fork
    row: dict[str, Any]
    start = time.time()
    try:
        row = check(name)
    except engine.errors.EngineError as error:
        row = {"refused": f"{type(error).__name__}: {error}"}
    except Exception as error:  # a failure is a result, and the next model has its turn
        row = {"failed": f"{type(error).__name__}: {error}"}
    row["total"] = round(time.time() - start, 1)
    row["gigabytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    sender.send(row)


# ---------------------------------------------------------------- all of them


def code_state() -> str:
    """Return a hash of what the results depend on: the engine, this benchmark, the versions of torch."""
    files = [*sorted((ROOT / "engine").rglob("*.py")), Path(__file__), Path(zoo.__file__)]
    digest = hashlib.sha256(f"{torch.__version__} {torchvision.__version__}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def supervise(check: Check, name: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """Check one model in a process of its own, forked from this one, which has imported all and computed nothing.

    Args:
        check: returns the row.
        name: of the model.
        seconds: of CPU time, or what other programs leave of ten times as long.
        gigabytes: of memory.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(check, name, seconds, gigabytes, sender))
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv() if receiver.poll(10 * seconds) else {}
        return row or {"failed": f"took longer than {seconds:.0f} s"}
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        return {"failed": f"took longer than {seconds:.0f} s" if late else f"ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def verdict(row: dict[str, Any]) -> str:
    """Return ``exact``, ``refused``, or ``failed``."""
    if "refused" in row or "failed" in row:
        return "refused" if "refused" in row else "failed"
    return "exact" if row["error"] <= row["tolerance"] and row["predicted"] and small_enough(row) else "failed"


def small_enough(row: dict[str, Any]) -> bool:
    """Whether a classification model lost as much as it should."""
    before, after = row["parameters"]
    return zoo.task_of(row["model"]) != "classification" or after <= (1 - SMALLER) * before


def reason(row: dict[str, Any]) -> str:
    """Return why a row is not exact."""
    if "refused" in row or "failed" in row:
        return general(str(row.get("refused") or row.get("failed")))
    faults = [] if row["error"] <= row["tolerance"] else [f"relative error {row['error']:.1e}"]
    faults += [] if row["predicted"] else ["the counted sizes are not the measured ones"]
    return "; ".join(faults if small_enough(row) else [*faults, "lost fewer parameters than it should"])


def line(row: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    if "parameters" not in row:
        return f"{row['model']:36} {verdict(row):8} {reason(row)}"
    (before, after), (macs, fewer) = row["parameters"], row["macs"]
    return (
        f"{row['model']:36} {verdict(row):8} {row['error']:.1e}  {before / 1e6:7.2f} M -> {after / 1e6:7.2f} M  "
        f"{macs / 1e9:8.3f} G -> {fewer / 1e9:8.3f} G  {row['seconds']:6.1f} s  {row['gigabytes']:.1f} GiB  "
        f"{reason(row)}"
    )


# ---------------------------------------------------------------- the page

HEAD = """# Survey of torchvision

`make breadth` masks half of the units of each dependency group (channels, neurons, heads, the residual stream),
compacts each model, and compares it with the masked one: {exact} of {all} models are exact, {refused} refused,
{failed} failed. {versions}, on one CPU thread.

Everything that could hide an error is random: statistics, affine parameters, biases, layer scales, tokens, tables. The
error is the largest difference relative to the largest entry of the output, at two batch sizes and, if the model
accepts it, a second resolution; in float64, or float32 above 300 million parameters. Detectors are compared at the
outputs of their heads. The counted sizes equal the measured ones, and forward and backward run in train mode after
compaction. MACs are per sample, at the small input sizes of this test. Seconds are CPU time for tracing, planning,
compacting and verifying.
"""


def table(rows: Sequence[dict[str, Any]], task: str) -> list[str]:
    """Return a table of the rows of a task."""
    lines = [
        f"\n## {task.replace('_', ' ').capitalize()}\n",
        "| model | verdict | error | parameters, M | MACs, G | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: r["model"]):
        if "parameters" not in row:
            lines.append(f"| {row['model']} | {verdict(row)}: {reason(row)} | | | | |")
            continue
        (before, after), (macs, fewer) = row["parameters"], row["macs"]
        lines.append(
            f"| {row['model']} | {verdict(row)} {reason(row)}".rstrip()
            + f" | {row['error']:.0e} | {before / 1e6:.2f} → {after / 1e6:.2f} | {macs / 1e9:.3f} → {fewer / 1e9:.3f} "
            f"| {row['seconds']:.1f} |"
        )
    return lines


def staying(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return why groups stayed whole, with the number of models in which they did."""
    models = Counter(r for row in rows for r in set(map(general, row.get("stays", {}))))
    if not models:
        return []
    head = [
        "\n## Not prunable, and why\n",
        "The reasons given by the engine, with the number of models in which each occurs.\n",
    ]
    return [*head, "| reason | models |", "|---|---|", *(f"| {r} | {n} |" for r, n in models.most_common())]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with all tables."""
    counts = Counter(map(verdict, rows))
    versions = f"torch {torch.__version__.split('+')[0]}, torchvision {torchvision.__version__.split('+')[0]}"
    numbers = {"exact": counts["exact"], "refused": counts["refused"], "failed": counts["failed"], "all": len(rows)}
    lines = [HEAD.format(versions=versions, **numbers)]
    for task in zoo.TASKS:
        of_task = [row for row in rows if zoo.task_of(row["model"]) == task]
        lines += table(of_task, task) if of_task else []
    return "\n".join([*lines, *staying(rows)]) + "\n"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help="names of torchvision models")
    parser.add_argument("--quick", action="store_true", help="one model of each architecture")
    parser.add_argument("--masks", action="store_true", help="four kinds of masks on convolutional networks")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--any-state", action="store_true", help="take results of an earlier state of the code too")
    parser.add_argument("--time", type=float, default=900, metavar="S", help="limit per model, default 900 s")
    parser.add_argument("--memory", type=float, default=12, metavar="GIB", help="limit per model, default 12 GiB")
    return parser.parse_args()


def stored_rows(state: str | None) -> dict[str, dict[str, Any]]:
    """Return the latest results by model, of one state of the code or of any."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = map(json.loads, lines)
    return {row["model"]: row for row in rows if state in (None, row["state"])}


def main() -> int:
    """Run what has not been run yet, print each row, write the page, and return 1 if a model is not exact."""
    args = arguments()
    if args.masks:
        script = str(Path(__file__).with_name("breadth_masks.py"))
        return subprocess.call([sys.executable, script, *args.models, *(["--fresh"] if args.fresh else [])])
    everything = [name for task in zoo.TASKS for name in zoo.names(task)]
    wanted = args.models or (zoo.FAMILIES if args.quick else everything)
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    if args.fresh:
        RESULTS.unlink(missing_ok=True)
    state = code_state()
    done = stored_rows(None if args.any_state else state)
    for name in sorted(wanted, key=zoo.published_size):
        if name not in done:
            done[name] = {"model": name, "state": state} | supervise(check, name, args.time, args.memory)
            with RESULTS.open("a") as out:
                out.write(json.dumps(done[name]) + "\n")
        print(line(done[name]), flush=True)
    if set(everything) <= done.keys():
        PAGE.write_text(page([done[name] for name in everything]))
    exact = sum(verdict(done[name]) == "exact" for name in wanted)
    print(f"{exact} of {len(wanted)} are exact")
    return 0 if exact == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
