"""Pictures of tables. They need matplotlib, which the extra ``plots`` installs; nothing else does."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InputError

__all__ = ["dependency_figure", "sensitivity_figure", "show"]

_INCH = 0.25  # height of a row


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib, which is not installed. Install the extra: pip install 'lightning-compress[plots]'"
        ) from error


def _axes(width: float, height: float) -> tuple[Any, Any]:
    """A figure of its own, outside of pyplot's list, so that nothing has to be closed."""
    figure = _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def show(figure: Any, path: str | os.PathLike[str] | None, writer: Any = None, tag: str = "") -> Any:
    """Write a figure where it is wanted.

    Args:
        figure: a matplotlib figure.
        path: picture file; its ending gives the format. None: no file.
        writer: a TensorBoard ``SummaryWriter``, or None.
        tag: name in TensorBoard.

    Returns:
        The figure.

    Raises:
        InputError: for an ending that is no picture format.
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
    """Draw the metrics of a sensitivity analysis.

    Args:
        rows: layer -> sparsity -> metric.
        sparsities: the columns.
        baseline: metric of the un-pruned model.
        kind: ``"heatmap"`` or ``"curves"``.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: without matplotlib.
        InputError: for another kind, or an empty table.
    """
    kinds = {"heatmap": _heatmap, "curves": _curves}
    if kind not in kinds or not rows:
        wrong = f"`kind` is one of {', '.join(kinds)}; got {kind!r}." if rows else "The table has no rows to draw."
        raise InputError(wrong)
    return kinds[kind](rows, sparsities, baseline)


def _heatmap(rows: Mapping[str, Mapping[float, float]], sparsities: Sequence[float], baseline: float) -> Any:
    figure, axes = _axes(3 + 0.6 * len(sparsities), 1.5 + _INCH * len(rows))
    cells = [[row.get(s, math.nan) for s in sparsities] for row in rows.values()]
    image = axes.imshow(cells, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(sparsities)), [str(s) for s in sparsities])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.set_xlabel("sparsity")
    axes.set_title(f"metric with one layer pruned (un-pruned: {baseline:.4g})", fontsize=9)
    figure.colorbar(image, ax=axes)
    return figure


def _curves(rows: Mapping[str, Mapping[float, float]], sparsities: Sequence[float], baseline: float) -> Any:
    figure, axes = _axes(8, max(4.5, 1 + 0.6 * _INCH * len(rows)))
    for layer, row in rows.items():
        axes.plot([0.0, *sorted(row)], [baseline, *(row[s] for s in sorted(row))], marker=".", label=layer)
    axes.axhline(baseline, color="grey", linewidth=0.8)
    axes.set_xlabel("sparsity of the layer")
    axes.set_ylabel("metric")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def dependency_figure(sets: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Any:
    """Draw dependency sets: a row per set, and in it a dot per layer, from left to right in the order of the model.

    Args:
        sets: names of layers, set by set.
        sizes: output channels of each layer.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: without matplotlib.
        InputError: where there are no sets.
    """
    if not sets:
        raise InputError("The model has no dependency sets to draw.")
    layers = [name for name in sizes if any(name in s for s in sets)]
    figure, axes = _axes(3 + 0.22 * len(layers), 2.5 + _INCH * len(sets))
    for number, names in enumerate(sets):
        places = sorted(layers.index(name) for name in names)
        axes.plot(places, [number] * len(places), marker="o", linewidth=2)
    axes.set_xticks(range(len(layers)), layers, rotation=90, fontsize=6)
    axes.set_yticks(range(len(sets)), [f"Set {n}: {sizes[s[0]]} channels" for n, s in enumerate(sets, 1)], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", linewidth=0.3)
    axes.set_title("layers that keep the same channels", fontsize=9)
    return figure
