"""Plots of tables. They require matplotlib, which the extra ``plots`` installs."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InputError

__all__ = ["accuracy_figure", "channels_figure", "dependency_figure", "lanes", "sensitivity_figure", "show"]

_INCH = 0.22  # height of a row
_COLORS = 10  # that matplotlib has before it starts again
_DOTS = 160  # per inch: TensorBoard shows images small first, and in full size on a click


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib, which is not installed. Install the extra: pip install 'lightning-compress[plots]'"
        ) from error


def _axes(width: float, height: float) -> tuple[Any, Any]:
    """Create a figure outside of pyplot's registry, so that it need not be closed."""
    figure = _matplotlib("figure").Figure(figsize=(width, height), dpi=_DOTS, layout="constrained")
    return figure, figure.subplots()


def show(figure: Any, path: str | os.PathLike[str] | None, writer: Any = None, tag: str = "") -> Any:
    """Save a figure to a file and to TensorBoard, as requested.

    Args:
        figure: a matplotlib figure.
        path: image file; its extension determines the format. None: no file.
        writer: a TensorBoard ``SummaryWriter``, or None.
        tag: tag in TensorBoard.

    Returns:
        The figure.

    Raises:
        InputError: for an extension that is not an image format.
    """
    if path is not None:
        try:
            figure.savefig(path)
        except ValueError as error:
            raise InputError(f"The picture {os.fspath(path)!r} cannot be written: {error}") from error
    if writer is not None:
        writer.add_figure(tag, figure, close=False)
    return figure


def sensitivity_figure(
    rows: Mapping[str, Mapping[float, float]], sparsities: Sequence[float], baseline: float, kind: str
) -> Any:
    """Plot the metrics of a sensitivity analysis.

    Args:
        rows: layer -> sparsity -> metric.
        sparsities: the columns.
        baseline: metric of the unpruned model.
        kind: ``"heatmap"`` or ``"curves"``.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: if matplotlib is not installed.
        InputError: for any other kind, or an empty table.
    """
    kinds = {"heatmap": _heatmap, "curves": _curves}
    if kind not in kinds or not rows:
        wrong = f"`kind` is one of {', '.join(kinds)}; got {kind!r}." if rows else "The table has no rows to draw."
        raise InputError(wrong)
    return kinds[kind](rows, sparsities, baseline)


def _heatmap(rows: Mapping[str, Mapping[float, float]], sparsities: Sequence[float], baseline: float) -> Any:
    figure, axes = _axes(4 + 0.6 * len(sparsities), 1.5 + _INCH * len(rows))
    cells = [[row.get(s, math.nan) for s in sparsities] for row in rows.values()]
    image = axes.imshow(cells, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(sparsities)), [str(s) for s in sparsities])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.set_xlabel("sparsity")
    figure.suptitle(f"metric with one layer pruned (with none: {baseline:.4g})", fontsize=9)
    figure.colorbar(image, ax=axes)
    return figure


def _curves(rows: Mapping[str, Mapping[float, float]], sparsities: Sequence[float], baseline: float) -> Any:
    figure, axes = _axes(8, 4.5)
    points = {layer: ([0.0, *sorted(row)], [baseline, *(row[s] for s in sorted(row))]) for layer, row in rows.items()}
    change = {layer: max((abs(y - baseline) for y in ys), default=0.0) for layer, (_, ys) in points.items()}
    largest = sorted(rows, key=lambda layer: -change[layer])[:_COLORS]
    for layer, (x, y) in points.items():
        if layer in largest:
            axes.plot(x, y, marker=".", label=layer)
        else:
            axes.plot(x, y, color="grey", linewidth=0.6, alpha=0.6, zorder=1)
    if len(rows) > _COLORS:
        axes.plot([], [], color="grey", linewidth=0.6, label=f"{len(rows) - _COLORS} others, which change it less")
    axes.axhline(baseline, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("sparsity of the layer")
    axes.set_ylabel("metric")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def lanes(sets: Sequence[Sequence[str]], order: Sequence[str]) -> list[int]:
    """Assign each set a lane, a line through the rows of its layers, so that sets in one lane do not overlap.

    Args:
        sets: names of layers, set by set; each has at least one.
        order: the layers in the order of their rows.

    Returns:
        The lane of each set, from 0; a lane is reused once it is free.

    Example:
        >>> lanes([["a", "c"], ["b"], ["d", "e"]], "abcde")
        [0, 1, 0]
    """
    row = {name: number for number, name in enumerate(order)}
    spans = sorted((min(rows), max(rows), n) for n, rows in enumerate([[row[x] for x in s] for s in sets]))
    busy: list[int] = []
    lane_by_set = [0] * len(sets)
    for start, end, number in spans:
        lane = next((n for n, until in enumerate(busy) if until < start), len(busy))
        busy[lane : lane + 1] = [end]
        lane_by_set[number] = lane
    return lane_by_set


def dependency_figure(sets: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Any:
    """Plot dependency sets: a row per layer, in the order of the model, and a line through the layers of each set.

    Args:
        sets: names of layers, set by set.
        sizes: output channels of each layer.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: if matplotlib is not installed.
        InputError: if there are no sets.
    """
    if not sets:
        raise InputError("The model has no dependency sets to draw.")
    order = [name for name in sizes if any(name in s for s in sets)]
    places = lanes(sets, order)
    width = 1 + max(places)
    figure, axes = _axes(1.6 + 0.2 * width + 0.07 * max(map(len, order)), 0.5 + _INCH * len(order))
    for names, lane in zip(sets, places, strict=True):
        axes.plot([lane] * len(names), sorted(map(order.index, names)), marker="o", linewidth=2)
    axes.set_xlim(-0.7, width - 0.3)
    axes.set_xticks([])
    axes.set_yticks(range(len(order)), order, fontsize=8)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(order)), [f"{sizes[name]} channels" for name in order], fontsize=8)
    axes.set_ylim(len(order) - 0.5, -0.5)
    for side in (*axes.spines.values(), *right.spines.values()):
        side.set_visible(False)
    axes.tick_params(length=0)
    right.tick_params(length=0)
    figure.suptitle("dots on one line keep the same channels", fontsize=8)
    return figure


def channels_figure(kept: Mapping[str, tuple[int, int]]) -> Any:
    """Plot how many output channels each layer keeps and loses.

    Args:
        kept: layer -> (kept channels, all channels).

    Returns:
        A matplotlib figure: a bar per layer.

    Raises:
        ImportError: if matplotlib is not installed.
        InputError: if there are no layers.

    Example:
        >>> channels_figure({"conv1": (16, 64), "conv2": (32, 32)})  # doctest: +SKIP
        <Figure size ...>
    """
    if not kept:
        raise InputError("There are no layers with channels to draw.")
    figure, axes = _axes(2.8 + 0.07 * max(map(len, kept)), 0.9 + _INCH * len(kept))
    rows = range(len(kept))
    axes.barh(rows, [count for count, _ in kept.values()], color="#2563c9", label="kept")
    removed = [size - count for count, size in kept.values()]
    axes.barh(rows, removed, left=[count for count, _ in kept.values()], color="#c9d2e3", label="removed")
    axes.set_yticks(rows, list(kept), fontsize=8)
    axes.set_ylim(len(kept) - 0.5, -0.5)
    axes.set_xlabel("output channels", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for row, (count, size) in zip(rows, kept.values(), strict=True):
        axes.annotate(f"{count} of {size}", (size, row), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.25)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    return figure


def accuracy_figure(metric: str, points: Sequence[tuple[str, float, float]]) -> Any:
    """Plot a metric against cost, from the dense network to the small one.

    Args:
        metric: its name.
        points: (name of the network, multiply-accumulates, value), in the order in which they are joined.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: if matplotlib is not installed.
        InputError: if there are no points.

    Example:
        >>> accuracy_figure("val_acc", [("dense", 1e9, 0.93), ("compacted", 5e8, 0.92)])  # doctest: +SKIP
        <Figure size ...>
    """
    if not points:
        raise InputError("There are no points to draw.")
    figure, axes = _axes(5.2, 3.2)
    axes.plot([x for _, x, _ in points], [y for _, _, y in points], color="#9aa5b8", linestyle="--", linewidth=1)
    for name, x, y in points:
        axes.plot([x], [y], marker="o", linestyle="", label=name)
    axes.set_xlim(0, 1.06 * max(x for _, x, _ in points))
    axes.margins(y=0.15)
    axes.set_xlabel("MACs per sample", fontsize=8)
    axes.set_ylabel(metric, fontsize=8)
    axes.xaxis.set_major_formatter(_matplotlib("ticker").EngFormatter(sep=" "))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure
