"""Rows of measurements -> the page ``docs/benchmarks.md``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

__all__ = ["page"]

Rows = Mapping[str, Mapping[str, Any]]


class _Mark(NamedTuple):
    """A target, and the measured value."""

    what: str
    value: float
    limit: float
    form: str = "{:.2f}"

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "met" if self.met else "**missed**"
        return f"{self.what}: {self.form.format(self.value)} (target: at most {self.limit:g}): {verdict}."


class _Section(NamedTuple):
    """A part of the page: its text, its targets, and other shortcomings."""

    lines: list[str]
    marks: list[_Mark]
    lost: Sequence[str] = ()

    def text(self) -> list[str]:
        return [*self.lines, *(f"- {mark}" for mark in self.marks), *(f"- {line}" for line in self.lost), ""]


def _mean(ratios: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return ["| " + " | ".join(head) + " |", f"|{rule}|", *("| " + " | ".join(row) + " |" for row in rows), ""]


def _ratios(stages: Mapping[str, list[float]], over: Callable[[int], float]) -> list[float]:
    return [ours / over(turn) for turn, ours in enumerate(stages["ours"])]


def _floor_ratio(stages: Mapping[str, list[float]]) -> float:
    return median(_ratios(stages, lambda turn: stages["recording"][turn] + stages["writing"][turn]))


def _peer_ratio(stages: Mapping[str, list[float]]) -> float:
    return median(_ratios(stages, lambda turn: stages["peer"][min(turn, len(stages["peer"]) - 1)]))


def _spread(values: Sequence[float]) -> str:
    return f"{1e3 * median(values):.0f} ({1e3 * min(values):.0f}–{1e3 * max(values):.0f})"


def _analysis(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## Analysis",
        "",
        "Trace, repair, plan and apply with `confidence=0`. The floor is one bare recording of the forward pass on "
        "tensors without data, plus writing the weights of the compacted model once. Torch-Pruning builds its graph "
        "and prunes half of the channels; it verifies nothing, takes no masks, and folds no constants. Milliseconds "
        "of CPU time, median (smallest–largest); ratios are medians over paired rounds.",
        "",
    ]
    cells = []
    for name, row in rows.items():
        stages = row["stages"]
        own = [f"{1e3 * median(stages[s]):.0f}" for s in ("trace", "repair", "plan and swap")]
        floor = [a + b for a, b in zip(stages["recording"], stages["writing"], strict=True)]
        ratios = [f"{_floor_ratio(stages):.2f}", f"{_peer_ratio(stages):.2f}"]
        columns = [*own, _spread(stages["ours"]), _spread(floor), _spread(stages["peer"]), *ratios]
        cells.append([name, str(row["nodes"]), *columns])
    costs = "trace, repair, plan + apply, total, floor, Torch-Pruning, total / floor, total / Torch-Pruning".split(", ")
    lines += _table(["network", "ops", *costs], cells)
    peers = {name: _peer_ratio(row["stages"]) for name, row in rows.items()}
    worst = max(peers, key=lambda name: peers[name])
    slower = [f"{name} ({ratio:.2f} × its time)" for name, ratio in peers.items() if ratio > 1]
    marks = [
        _Mark("Total over the floor, geometric mean", _mean(_floor_ratio(row["stages"]) for row in rows.values()), 2),
        _Mark("Total over Torch-Pruning, geometric mean", _mean(peers.values()), 0.4),
        _Mark(f"Total over Torch-Pruning, worst network ({worst})", peers[worst], 1.5),
    ]
    return _Section(lines, marks, [f"Slower than Torch-Pruning on {', '.join(slower)}."] if slower else [])


def _first(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## The first analysis in a process",
        "",
        "The same, but only once per process and with nothing warmed up except the imports, as in a script. "
        "Milliseconds of CPU time.",
        "",
    ]
    names = [name for name in rows if not name.endswith(", peer")]
    pairs = {name: (rows[name]["seconds"], rows[f"{name}, peer"]["seconds"]) for name in names}
    cells = [[name, f"{1e3 * own:.0f}", f"{1e3 * peer:.0f}"] for name, (own, peer) in pairs.items()]
    slower = [f"{name} ({own / peer:.2f} × its time)" for name, (own, peer) in pairs.items() if own > peer]
    lost = [f"Slower than Torch-Pruning in the first analysis on {', '.join(slower)}."] if slower else []
    return _Section([*lines, *_table(["network", "total", "Torch-Pruning"], cells)], [], lost)


def _verification(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## Verification",
        "",
        "What the default verification adds, compared with the forward passes that it makes (masked and compacted "
        "model, in the certificate's dtype and sizes, as torch runs them). Verification runs large convolutions in "
        "bands and depthwise ones as sums, which takes less time than torch's kernels do in float64. CPU seconds.",
        "",
    ]
    ratios = {n: median(a / p for a, p in zip(r["added"], r["passes"], strict=True)) for n, r in rows.items()}
    cells = [
        [name, f"{median(row['added']):.2f}", f"{median(row['passes']):.2f}", f"{ratios[name]:.2f}"]
        for name, row in rows.items()
    ]
    lines += _table(["network", "added", "forward passes", "ratio"], cells)
    return _Section(lines, [_Mark("Verification over its forward passes, largest", max(ratios.values()), 1.5)])


def _memory(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## Memory",
        "",
        "Peak memory above what is resident with the model and its masks, in MB; verified with the default confidence.",
        "",
    ]
    cells, plain, verified = [], [], []
    for name, row in rows.items():
        limits = 1.2 * row["compacted"] + 100, 4 * row["dense"]
        plain.append(row["peak"] / limits[0])
        verified.append(row["peak verified"] / limits[1])
        numbers = [row["dense"], row["compacted"], row["peak"], limits[0], row["peak verified"], limits[1]]
        cells.append([name, *(f"{n:.0f}" for n in numbers)])
    head = "network, dense weights, compacted, peak, limit, peak when verified, limit".split(", ")
    marks = [
        _Mark("Peak memory over 1.2 × the compacted weights + 100 MB, largest", max(plain), 1),
        _Mark("Peak memory when verified over 4 × the dense weights, largest", max(verified), 1),
    ]
    return _Section([*lines, *_table(head, cells)], marks)


def _scaling(rows: Mapping[str, Any]) -> _Section:
    lines = ["## Scaling", "", "CPU seconds of the whole analysis, by number of blocks.", ""]
    for name, row in rows.items():
        lines += _table([name, *map(str, row["sizes"])], [["seconds", *(f"{s:.2f}" for s in row["seconds"])]])
    return _Section(lines, [_Mark(f"Exponent of growth, {name}", row["exponent"], 1.15) for name, row in rows.items()])


def _by_hand(times: Mapping[str, list[float]]) -> list[float]:
    return [a / b for a, b in zip(times["compacted"], times["by hand"], strict=True)]


def _latency(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## Latency of the compacted network",
        "",
        "Half of the units of each dependency group removed (for vit_b_16: half of the heads and neurons), compared "
        "with the same network built narrow by hand. Batch 1, milliseconds of CPU time, medians over turns in both "
        "orders; the ratio with its quartiles. Where the residual stream is narrowed too, the network built by hand "
        "has ordinary narrow norms and so computes a different function: that ratio is the cost of exact norms.",
        "",
    ]
    cells, exact = [], []
    for name, row in rows.items():
        low, middle, high = quantiles(_by_hand(row["times"]), n=4)
        numbers = [median(row["times"][key]) for key in ("dense", "compacted", "by hand")]
        cells.append([name, *(f"{n:.1f}" for n in numbers), f"{middle:.3f} ({low:.3f}–{high:.3f})"])
        exact += [middle] if row["same function"] else []
    lines += _table(["network", "dense", "compacted", "by hand", "compacted / by hand"], cells)
    return _Section(lines, [_Mark("Compacted over built by hand, largest", max(exact), 1.03, "{:.3f}")])


def _language(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## Language models without weights",
        "",
        "Shapes on the `meta` device, in bfloat16: traced with 16 tokens, half of the units of each dependency "
        "group masked (heads with their shared keys, neurons with their gates, the residual stream), planned, "
        "compacted and counted. CPU seconds; the peak is that of the whole process, including torch and "
        "transformers.",
        "",
    ]
    cells, lost = [], []
    for name, row in rows.items():
        seconds = [f"{row['seconds'][key]:.1f}" for key in ("trace", "masks", "plan", "count")]
        sizes = " → ".join(f"{n / 1e9:.2f}" for n in row["parameters"])
        groups = "{} of {}".format(*row["groups"])
        cells.append([name, str(row["nodes"]), groups, sizes, *seconds, f"{row['peak'] / 1e3:.1f}"])
        lost += [f"{name}: {reason}" for reason in _reasons(row["stays"])]
    head = "model, ops, groups that shrink, parameters in B, trace, groups and masks, plan and apply, count, peak in GB"
    lines += _table(head.split(", "), cells)
    marks = []
    if (row := rows.get("Llama 70 B")) is not None:
        spent = row["seconds"]
        marks = [
            _Mark("Llama 70 B traced, counted and planned, seconds", sum(spent.values()), 60),
            _Mark("Llama 70 B, peak in GB", row["peak"] / 1e3, 4),
        ]
    return _Section(lines, marks, lost)


def _reasons(stays: Iterable[str]) -> list[str]:
    """Return what stays for another reason than that it is the vocabulary, without places that differ by layer."""
    reasons = [re.sub(r" in '[^']*'| \(/\S*?([\w.]+:\d+)\)", lambda m: f" ({m[1]})" if m[1] else "", r) for r in stays]
    harmless = ("is an output of the model", "meets a tensor whose size along this axis is fixed")
    return [f"some groups cannot be pruned: {r}." for r in dict.fromkeys(reasons) if r not in harmless]


def _overhead(rows: Mapping[str, Any]) -> _Section:
    lines = [
        "## Training",
        "",
        "A training step with the callbacks, in which nothing is pruned, compared with a plain one: resnet18, 64 × "
        "64, SGD, CPU time, two fits alternating step by step. “nothing” compares two plain fits and so shows the "
        "noise. The callbacks cost one pass over the weights and one over their gradients, whatever the batch size. "
        "With batches as small as 8 these are a larger part of the step, and no target applies.",
        "",
    ]
    cells, middles = [], {}
    for name, row in rows.items():
        low, middles[name], high = quantiles(row["ratios"], n=4)
        spread = f"{middles[name]:.3f} ({low:.3f}–{high:.3f})"
        cells.append([name, f"{row['plain']:.1f}", spread, f"{fmean(row['ratios']):.3f}"])
    marks = [
        _Mark(f"A step with {name}, relative to a plain step", middle, 1.02, "{:.3f}")
        for name, middle in middles.items()
        if name.startswith("all") and not name.endswith(" 8")
    ]
    return _Section([*lines, *_table(["callbacks", "plain step, ms", "median (quartiles)", "mean"], cells)], marks)


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], _Section]] = {
    "analysis": _analysis,
    "first": _first,
    "verification": _verification,
    "memory": _memory,
    "scaling": _scaling,
    "latency": _latency,
    "language": _language,
    "overhead": _overhead,
}


def page(rows: Rows, machine: str, rounds: int) -> str:
    """Return the page.

    Args:
        rows: kind of measurement -> name -> what was found.
        machine: where it was measured.
        rounds: how often.
    """
    sections = [make(rows[kind]) for kind, make in _SECTIONS.items() if kind in rows]
    marks = [mark for section in sections for mark in section.marks]
    lost = [str(mark) for mark in marks if not mark.met] + [line for section in sections for line in section.lost]
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. All numbers are from one state of the code, on one machine.",
        "",
        f"Machine: {machine}. {rounds} rounds. Each measurement has its own process; unless stated otherwise, the "
        "contestants take turns after a warm-up.",
        "",
        f"{sum(mark.met for mark in marks)} of {len(marks)} targets met. Shortcomings:",
        "",
        *([f"- {line}" for line in lost] or ["- none."]),
        "",
    ]
    for section in sections:
        lines += section.text()
    return "\n".join(lines).rstrip() + "\n"
