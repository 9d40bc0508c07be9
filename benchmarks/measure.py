"""One measurement each, run in a process of its own by `benchmarks/speed.py`."""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import engine
from benchmarks.language import SHAPES, planned
from benchmarks.language import build as language_model
from benchmarks.narrow import built_narrow, group_wise
from benchmarks.overhead import SETS, compare
from benchmarks.subjects import MODELS, SCALED, Masks, build, clock, example, masks_of, ours, peer, recording, writing

Row = dict[str, Any]
_PATIENCE = 60.0  # CPU seconds after which the peer is not run again


def _warm_up(with_peer: bool = False, confidence: int = 0) -> None:
    model, x = build("resnet18"), example("resnet18")
    recording(model, x)
    ours(copy.deepcopy(model), x, masks_of(model), confidence)
    if with_peer:
        peer(model, x)


def analysis(name: str, rounds: int) -> Row:
    """CPU seconds of floor, this project and the peer, in turns; every round starts from a fresh copy."""
    _warm_up(with_peer=True)
    base, x = build(name), example(name)
    masks = masks_of(base)
    stages: dict[str, list[float]] = {}
    spent = 0.0

    def note(times: dict[str, float]) -> float:
        for stage, seconds in times.items():
            stages.setdefault(stage, []).append(seconds)
        return sum(times.values())

    for _ in range(rounds):
        gc.collect()
        note({"recording": recording(base, x)})
        model = copy.deepcopy(base)
        note({"ours": note(ours(model, x, masks))})
        note({"writing": writing(model)})
        if spent < _PATIENCE:
            seconds = note(peer(copy.deepcopy(base), x))
            spent += seconds
            note({"peer": seconds})
    return {"nodes": len(engine.trace(base, x).nodes), "stages": stages}


def first(name: str, rounds: int) -> Row:
    """CPU seconds of the first analysis in a process, by this project (``"net"``) or the peer (``"net, peer"``)."""
    network, _, other = name.partition(", ")
    model, x = build(network), example(network)
    masks = masks_of(model)
    gc.collect()
    return {"seconds": sum((peer(model, x) if other else ours(model, x, masks)).values())}


def verification(name: str, rounds: int) -> Row:
    """CPU seconds that verification adds, and of the forward passes that it makes."""
    _warm_up(confidence=1)
    base, x = build(name), example(name)
    masks = masks_of(base)
    repaired = engine.fix_mask_conflict(masks, base, x)
    added, passes = [], []
    for _ in range(rounds):
        plain, verified = copy.deepcopy(base), copy.deepcopy(base)
        without, _ = _compacted(plain, x, repaired, 0)
        seconds, certificate = _compacted(verified, x, repaired, 8)
        added.append(seconds - without)
        passes.append(_forwards(base, plain, certificate))
    return {"added": added, "passes": passes}


def _compacted(model: nn.Module, x: Tensor, masks: Masks, confidence: int) -> tuple[float, engine.Certificate]:
    speedup = engine.ModelSpeedup(model, x, masks, confidence=confidence)
    gc.collect()  # of what was done before
    start = clock()
    speedup.speedup_model()
    return clock() - start, speedup.certificate


def _forwards(dense: nn.Module, small: nn.Module, certificate: engine.Certificate) -> float:
    dtype = getattr(torch, certificate.dtype)
    models = [copy.deepcopy(m).to(dtype) for m in (dense, small)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in certificate.shapes]
    start = clock()
    with torch.inference_mode():
        for model in models:
            for x in inputs:
                model(x)
    return clock() - start


def _memory(field: str) -> float:
    """A field of the process's status, in MB."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 1024


def _megabytes(model: nn.Module) -> float:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 2**20


def memory(name: str, rounds: int) -> Row:
    """Peak of the resident memory above what it was with the model and its masks in it, in MB.

    Verified with the default confidence.
    """
    _warm_up()
    model, x = build(name), example(name)
    masks, dense = masks_of(model), _megabytes(model)
    row: Row = {"dense": dense}
    for confidence, key in ((0, "peak"), (8, "peak verified")):
        small = copy.deepcopy(model)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        ours(small, x, masks, confidence)
        row[key] = _memory("VmHWM") - before
        row["compacted"] = _megabytes(small)
    return row


def scaling(name: str, rounds: int) -> Row:
    """CPU seconds against the number of blocks, and the exponent of the fit."""
    _warm_up()
    make, sizes, shape = SCALED[name]
    seconds = []
    for size in sizes if rounds > 2 else sizes[:-1]:
        model = make(size).eval()
        masks, x = masks_of(model), torch.randn(shape)
        runs = []
        for _ in range(3):
            small = copy.deepcopy(model)
            gc.collect()
            runs.append(sum(ours(small, x, masks).values()))
        seconds.append(median(runs))
    points = [(math.log(n), math.log(t)) for n, t in zip(sizes, seconds, strict=False)]
    return {"sizes": list(sizes[: len(seconds)]), "seconds": seconds, "exponent": _slope(points[1:])}


def _slope(points: list[tuple[float, float]]) -> float:
    """Least squares; the smallest size is left out, where what a call costs at all hides the growth."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def latency(name: str, rounds: int) -> Row:
    """CPU milliseconds of dense, compacted and hand-built network, batch 1, in turns."""
    network, _, stream = name.partition(", ")
    base, x = build(network), example(network)
    small = copy.deepcopy(base)
    engine.ModelSpeedup(small, x, group_wise(base, x, bool(stream)), confidence=0).speedup_model()
    models = {"dense": base, "compacted": small, "by hand": built_narrow(small)}
    times: dict[str, list[float]] = {key: [] for key in models}
    with torch.inference_mode():
        if not stream:
            torch.testing.assert_close(models["compacted"](x), models["by hand"](x), rtol=1e-3, atol=1e-4)
        for turn in range(5 * rounds + 3):
            order = list(models.items())[:: 1 if turn % 2 else -1]
            for key, model in order:
                start = clock()
                model(x)
                if turn >= 3:
                    times[key].append(1e3 * (clock() - start))
    return {"times": times, "same function": not stream}


def language(name: str, rounds: int) -> Row:
    """CPU seconds and peak memory (MB) of a language model without weights; once, since it takes long."""
    row = planned(language_model(name))
    return {**row, "peak": _memory("VmHWM") * 1.048576}


def overhead(name: str, rounds: int) -> Row:
    """Milliseconds of a plain training step, and the ratios of steps with callbacks to it."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    callbacks, _, batch = name.partition(", batch ")
    pairs = 10 * rounds
    setting = argparse.Namespace(device="cpu", clock="cpu", model="resnet18", size=64, batch=int(batch), pairs=pairs)
    plain, ratios = compare(SETS[callbacks], setting)
    return {"plain": plain, "ratios": ratios}


MEASURES: dict[str, tuple[Callable[[str, int], Row], list[str]]] = {
    "analysis": (analysis, MODELS),
    "first": (first, [f"{name}{who}" for name in MODELS for who in ("", ", peer")]),
    "verification": (verification, MODELS),
    "memory": (memory, MODELS),
    "scaling": (scaling, list(SCALED)),
    "latency": (latency, ["resnet50", "mobilenet_v2", "vit_b_16", "vit_b_16, with the residual stream"]),
    "language": (language, list(SHAPES)),
    "overhead": (overhead, [f"{s}, batch {b}" for b in (8, 32, 64) for s in ("nothing", "all, criterion l1")]),
}
