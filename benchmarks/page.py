"""Rows of measurements -> the page ``docs/benchmarks.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["page"]

Rows = Mapping[str, Mapping[str, Any]]


def _mean(ratios: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return ["| " + " | ".join(head) + " |", f"|{rule}|", *("| " + " | ".join(row) + " |" for row in rows), ""]


def _held(value: float, limit: float) -> str:
    """Say whether a mark is met."""
    return f"{value:.2f} (aim: at most {limit:g}): {'held' if value <= limit else '**not held**'}"


def _ratios(stages: Mapping[str, list[float]], over: Callable[[int], float]) -> list[float]:
    return [ours / over(turn) for turn, ours in enumerate(stages["ours"])]


def _floor_ratio(stages: Mapping[str, list[float]]) -> float:
    return median(_ratios(stages, lambda turn: stages["recording"][turn] + stages["writing"][turn]))


def _peer_ratio(stages: Mapping[str, list[float]]) -> float:
    return median(_ratios(stages, lambda turn: stages["peer"][min(turn, len(stages["peer"]) - 1)]))


def _spread(values: Sequence[float]) -> str:
    return f"{1e3 * median(values):.0f} ({1e3 * min(values):.0f}–{1e3 * max(values):.0f})"


def _analysis(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Analysis",
        "",
        "Trace, repair, plan and swap with `confidence=0`. The floor is one bare recording of the forward on tensors "
        "without data, plus writing the weights of the compacted model once. The peer is Torch-Pruning's graph and its "
        "pruning of half of the channels; it proves nothing, takes no masks, and folds no constants. Milliseconds of "
        "CPU, median (smallest–largest); ratios are medians over paired rounds.",
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
    head = "network, ops, trace, repair, plan + swap, all, floor, peer, all / floor, all / peer".split(", ")
    lines += _table(head, cells)
    floor = _mean(_floor_ratio(row["stages"]) for row in rows.values())
    peer = _mean(_peer_ratio(row["stages"]) for row in rows.values())
    worst = max(rows, key=lambda name: _peer_ratio(rows[name]["stages"]))
    most = _peer_ratio(rows[worst]["stages"])
    lost = [n for n, row in rows.items() if _peer_ratio(row["stages"]) > 1]
    return [
        *lines,
        f"- Geometric mean over the floor: {_held(floor, 2)}.",
        f"- Geometric mean over the peer: {_held(peer, 0.4)}.",
        f"- Worst network against the peer, {worst}: {_held(most, 1.5)}.",
        f"- Slower than the peer: {', '.join(lost) if lost else 'none'}.",
        "",
    ]


def _verification(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Verification",
        "",
        "What the default verification adds, against the forward passes that it makes (masked and compacted model, in "
        "the certificate's dtype and sizes). CPU seconds.",
        "",
    ]
    ratios = {n: median(a / p for a, p in zip(r["added"], r["passes"], strict=True)) for n, r in rows.items()}
    cells = [
        [name, f"{median(row['added']):.2f}", f"{median(row['passes']):.2f}", f"{ratios[name]:.2f}"]
        for name, row in rows.items()
    ]
    lines += _table(["network", "added", "forward passes", "ratio"], cells)
    return [*lines, f"- Largest ratio: {_held(max(ratios.values()), 1.5)}.", ""]


def _memory(rows: Mapping[str, Any]) -> list[str]:
    lines = ["## Memory", "", "Peak above what is resident with the model and its masks in memory, in MB.", ""]
    cells, plain, verified = [], [], []
    for name, row in rows.items():
        limits = 1.2 * row["compacted"] + 100, 4 * row["dense"]
        plain.append(row["peak"] / limits[0])
        verified.append(row["peak verified"] / limits[1])
        numbers = [row["dense"], row["compacted"], row["peak"], limits[0], row["peak verified"], limits[1]]
        cells.append([name, *(f"{n:.0f}" for n in numbers)])
    head = "network, dense weights, compacted, peak, its limit, peak when verified, its limit".split(", ")
    return [
        *lines,
        *_table(head, cells),
        f"- Peak over its limit (1.2 × the compacted weights + 100 MB), largest: {_held(max(plain), 1)}.",
        f"- When verified (4 × the dense weights), largest: {_held(max(verified), 1)}.",
        "",
    ]


def _scaling(rows: Mapping[str, Any]) -> list[str]:
    lines = ["## Growth", "", "The whole analysis against the number of blocks, CPU seconds.", ""]
    for name, row in rows.items():
        lines += _table([name, *map(str, row["sizes"])], [["seconds", *(f"{s:.2f}" for s in row["seconds"])]])
    marks = [f"- Exponent for {name}: {_held(row['exponent'], 1.15)}." for name, row in rows.items()]
    return [*lines, *marks, ""]


def _latency(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Latency of what comes out",
        "",
        "Half of the units of each dependency group removed (of vit_b_16: half of the heads and neurons), against the "
        "same network constructed narrow by hand. Batch 1, milliseconds of CPU, medians of turns in both orders.",
        "",
    ]
    cells, ratios = [], []
    for name, row in rows.items():
        times = row["times"]
        pairs = zip(times["compacted"], times["by hand"], strict=True)
        ratios.append(median(a / b for a, b in pairs))
        numbers = [median(times[key]) for key in ("dense", "compacted", "by hand")]
        cells.append([name, *(f"{n:.1f}" for n in numbers), f"{ratios[-1]:.3f}"])
    lines += _table(["network", "dense", "compacted", "by hand", "compacted / by hand"], cells)
    return [*lines, f"- Largest ratio: {_held(max(ratios), 1.03)}.", ""]


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "analysis": _analysis,
    "verification": _verification,
    "memory": _memory,
    "scaling": _scaling,
    "latency": _latency,
}


def page(rows: Rows, machine: str, rounds: int) -> str:
    """Return the page.

    Args:
        rows: kind of measurement -> name -> what was found.
        machine: where it was measured.
        rounds: how often.
    """
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`; every number below is from one run of it.",
        "",
        f"Machine: {machine}. {rounds} rounds; the contestants take turns in one process after a warm-up.",
        "",
    ]
    for kind, section in _SECTIONS.items():
        if kind in rows:
            lines += section(rows[kind])
    return "\n".join(lines).rstrip() + "\n"
