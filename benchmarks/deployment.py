"""Compacted networks in every form in which they ship, over the architectures of torchvision.

    python benchmarks/deployment.py [model ...]      (default: eighteen architectures; resumes where it stopped)

Half of the units of each dependency group are removed, in float32, everything that could hide an error drawn at random.
Then, each compared with the compacted model in eager mode at two batch sizes and, where the network is convolutional,
at twice the resolution: ONNX in ONNX Runtime, an exported program of `torch.export`, TorchScript, and `torch.compile`
in one graph. The weights go through safetensors and through the compacted checkpoint into a fresh model, which has to
return the same bits, and the checkpoint's size is compared with that of the same content without the plan.

Where the compacted model does not go into a form, the original is tried: "as the original" says that it does not
either. Results are kept in ``build/deployment.jsonl``; the page goes to ``docs/deployment.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.breadth import half_of_each_group
from engine.errors import EngineError
from engine.files.checkpoint import KEY, content_of
from lightning_compress.checkpoints.compacted import write
from lightning_compress.checkpoints.export import (
    another_batch,
    another_size,
    difference,
    export_onnx,
    export_program,
    export_torchscript,
)
from tests.engine import zoo
from tests.engine.exactness import parameters

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "deployment.jsonl"
PAGE = ROOT / "docs" / "deployment.md"
MODELS = """
    resnet18 regnet_y_400mf resnext50_32x4d densenet121 mobilenet_v2 mobilenet_v3_small efficientnet_b0 mnasnet0_5
    shufflenet_v2_x0_5 squeezenet1_1 googlenet vgg11_bn convnext_tiny vit_b_32 swin_t fcn_resnet50
    lraspp_mobilenet_v3_large r3d_18
""".split()
FORMS = ("onnx", "program", "torchscript", "compile")
TOLERANCE = 1e-5
ALLOWANCE = 256 * 1024  # bytes, beside one per cent


# ---------------------------------------------------------------- one model


def built(name: str) -> tuple[nn.Module, Any]:
    """Return a model with random weights and an input."""
    recipe = zoo.recipe(name)
    return zoo.build(name, torch.float32), zoo.example(name, recipe.batches[0], recipe.size, torch.float32)


def compacted(model: nn.Module, x: Any) -> nn.Module:
    """Remove half of the units of each dependency group."""
    graph = engine.trace(model, x)
    masks = half_of_each_group(model, engine.dependency_groups(model, x, graph=graph))
    return engine.ModelSpeedup(model, x, masks, confidence=2, graph=graph).speedup_model().eval()


def compiled(model: nn.Module, path: Path, x: Any, dynamic: Sequence[str]) -> float:
    """Compile in one graph, and compare; no code is generated, which would take minutes."""
    torch._dynamo.reset()
    batches = [another_batch(x), another_batch(another_batch(x)), *([another_size(x)] if "size" in dynamic else [])]
    return difference(model, torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager"), batches)


def scripted(model: nn.Module, path: Path, x: Any, dynamic: Sequence[str]) -> float:
    """Leave out what may differ: TorchScript takes any size."""
    return export_torchscript(model, path, x)


EXPORTS: dict[str, Callable[[nn.Module, Path, Any, Sequence[str]], float]] = {
    "onnx": export_onnx,
    "program": export_program,
    "torchscript": scripted,
    "compile": compiled,
}
SUFFIX = {"onnx": "onnx", "program": "pt2", "torchscript": "pt", "compile": "none"}


def tried(form: str, model: nn.Module, folder: Path, x: Any, dynamic: Sequence[str]) -> float | str:
    """Return the error of a form, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own
            return EXPORTS[form](model, folder / f"model.{SUFFIX[form]}", x, dynamic)
    except (EngineError, torch._dynamo.exc.TorchDynamoException) as error:
        return str(error).partition("\n")[0]


def forms(name: str, model: nn.Module, folder: Path, x: Any) -> Iterator[tuple[str, Any]]:
    """Try every form; of what fails, the original's too."""
    convolutional = zoo.recipe(name).larger and not name.startswith("swin")
    dynamic = ("batch", "size") if convolutional else ("batch",)
    yield "dynamic", dynamic
    for form in FORMS:
        start = time.process_time()
        outcome = tried(form, model, folder, x, dynamic)
        yield form, outcome
        yield f"{form} seconds", round(time.process_time() - start, 1)
        if isinstance(outcome, str):
            yield f"{form} of the original", tried(form, built(name)[0], folder, x, dynamic)


def loads(name: str, model: nn.Module, folder: Path, x: Any) -> dict[str, Any]:
    """Whether a fresh model returns the same bits from safetensors and from the checkpoint, and their sizes."""
    checkpoint = {"state_dict": model.state_dict(), "epoch": 1, KEY: content_of(model)}
    write(checkpoint, folder / "compacted.ckpt")
    torch.save({"state_dict": dict(model.state_dict()), "epoch": 1}, folder / "plain.ckpt")
    engine.save_safetensors(model, folder / "compacted.safetensors")
    expected = zoo.outputs(model, x)
    row = {}
    for kind in ("ckpt", "safetensors"):
        path = folder / f"compacted.{kind}"
        small = engine.load_compacted_state(built(name)[0], path)
        row[kind] = all(map(torch.equal, expected, zoo.outputs(small, x)))
        row[f"{kind} bytes"] = path.stat().st_size
    return row | {"plain bytes": (folder / "plain.ckpt").stat().st_size}


def check(name: str) -> dict[str, Any]:
    """Compact a model and ship it in every form."""
    model, x = built(name)
    before = parameters(model)
    model = compacted(model, x)
    with tempfile.TemporaryDirectory() as made_here:
        folder = Path(made_here)
        row = {"model": name, "parameters": [before, parameters(model)], **loads(name, model, folder, x)}
        return row | dict(forms(name, model, folder, x))


# ---------------------------------------------------------------- all of them


def holds(row: dict[str, Any]) -> bool:
    """Whether every form holds, or is out of reach of the original too."""
    if "failed" in row:
        return False
    small = row["ckpt bytes"] <= 1.01 * row["plain bytes"] + ALLOWANCE
    return small and row["ckpt"] and row["safetensors"] and all(form_holds(row, form) for form in FORMS)


def form_holds(row: dict[str, Any], form: str) -> bool:
    """Whether a form agrees, or is out of reach of the original too."""
    outcome = row[form]
    return isinstance(row[f"{form} of the original"], str) if isinstance(outcome, str) else outcome <= TOLERANCE


def supervise(name: str, seconds: float) -> dict[str, Any]:
    """Check one model in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"model": name, "failed": f"took longer than {seconds:.0f} s"}
    if done.returncode:
        return {"model": name, "failed": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def main() -> int:
    """Run what has not been run yet, print each row, write the page, and return 1 if a model does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help="names of torchvision models")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--time", type=float, default=1800, metavar="S", help="limit per model, default 1800 s")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        torch.set_num_threads(1)
        sys.stdout.write("\n" + json.dumps(check(args.models[0])) + "\n")
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    if args.fresh:
        RESULTS.unlink(missing_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {row["model"]: row for row in map(json.loads, lines)}
    for name in args.models or MODELS:
        if name not in done:
            done[name] = supervise(name, args.time)
            with RESULTS.open("a") as out:
                out.write(json.dumps(done[name]) + "\n")
        print(name, "holds" if holds(done[name]) else f"DOES NOT HOLD: {done[name]}", flush=True)
    if set(MODELS) <= done.keys():
        PAGE.write_text(page([done[name] for name in MODELS]))
    return 0 if all(holds(done[name]) for name in args.models or MODELS) else 1


# ---------------------------------------------------------------- the page

HEAD = """# Exported formats

`python benchmarks/deployment.py` removes half of the units of each dependency group of {all} torchvision architectures,
in float32, and exports the result to every format: {holds} of {all} pass. {versions}, on one CPU thread.

Each number is the largest difference from the compacted model in eager mode, relative to the largest output, at two
batch sizes and, where sizes are dynamic, at twice the resolution. "As the original" means that the format does not
accept the network before compaction either. `torch.compile` compiles a single graph (`fullgraph=True`, backend
`aot_eager`). A fresh model that loads the checkpoint or the safetensors file returns bit-identical outputs.

| model | parameters, M | dynamic | ONNX Runtime | `torch.export` | TorchScript | `torch.compile` | bit-identical |
|---|---|---|---|---|---|---|---|
"""
SIZES = """
## Sizes on disk

The checkpoint compared with one of the same weights without plan, certificate and digests. The allowance is 1 % +
256 KiB.

| model | plain, KiB | compacted, KiB | difference, KiB | safetensors, KiB |
|---|---|---|---|---|
"""


def cell(row: dict[str, Any], form: str) -> str:
    """Return what a form came to."""
    if isinstance(row[form], str):
        return "as the original" if form_holds(row, form) else f"**{row[form][:80]}**"
    return f"{row[form]:.0e}" if form_holds(row, form) else f"**{row[form]:.0e}**"


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with both tables."""
    packages = {"torch": torch, "ONNX Runtime": __import__("onnxruntime")}
    versions = ", ".join(f"{name} {package.__version__.split('+')[0]}" for name, package in packages.items())
    text = HEAD.format(all=len(rows), holds=sum(map(holds, rows)), versions=versions)
    sizes = SIZES
    for row in rows:
        if "failed" in row:
            text += f"| {row['model']} | **{row['failed']}** | | | | | | |\n"
            continue
        before, after = (n / 1e6 for n in row["parameters"])
        same = "yes" if row["ckpt"] and row["safetensors"] else "**no**"
        cells = " | ".join(cell(row, form) for form in FORMS)
        text += f"| {row['model']} | {before:.2f} → {after:.2f} | {', '.join(row['dynamic'])} | {cells} | {same} |\n"
        plain, ckpt, safe = (row[f"{kind} bytes"] / 1024 for kind in ("plain", "ckpt", "safetensors"))
        sizes += f"| {row['model']} | {plain:,.0f} | {ckpt:,.0f} | {ckpt - plain:,.0f} | {safe:,.0f} |\n"
    return text + sizes


if __name__ == "__main__":
    sys.exit(main())
