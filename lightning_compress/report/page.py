"""The report as a self-contained HTML page: no scripts, no network access, light and dark, any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

import engine
from engine.files import next_version, replacing, unwritable
from lightning_compress.report import content as reports
from lightning_compress.report import svg
from lightning_compress.report.content import Report, human
from lightning_compress.report.stages import against_cost
from lightning_compress.report.templating import render

_CHARTS = (
    ("MACs per sample", {"now": "complexity/macs", "after compaction": "complexity/macs_compacted"}),
    ("Parameters", {"now": "complexity/params", "after compaction": "complexity/params_compacted"}),
    ("Masked channels", {"share": "sparsity/channels"}),
)
_FIRST = ("Accuracy against cost", "After compaction")
_REST = ("Metrics", "Layers", "Not prunable, and why", "Certificate", "Plan", "Settings")
_MARKS = {"−": "better", "+": "worse"}  # classes of falling and rising costs
_MANY = 40  # number of rows from which on a table is collapsed


def write(report: Report, path: Path) -> Path:
    """Write the page; if the file exists, append ``-v1``, ``-v2``, … to its name.

    Args:
        report: the report.
        path: path of the file; its folder is created.

    Returns:
        The path of the file that was written.

    Raises:
        CheckpointError: if it cannot be written.
    """
    while True:
        target = next_version(path)
        try:
            with replacing(target, new=True) as temporary:
                temporary.write_text(html(report), encoding="utf-8")
        except FileExistsError:  # another process took the name meanwhile
            continue
        except OSError as error:
            raise unwritable(target, error) from error
        return target


def html(report: Report) -> str:
    """Render the page.

    Args:
        report: the report.

    Returns:
        A complete HTML document.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> before = survey(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), ones(1, 4))
        >>> page = html(Report("Net<1>", before, before))
        >>> page.startswith("<!doctype html>"), "Net&lt;1&gt;" in page, "<script" in page
        (True, True, False)
    """
    style = files("lightning_compress.report").joinpath("report.css").read_text(encoding="utf-8")
    return render(
        "page.html",
        report=report,
        style=Markup(style),
        sections=reports.sections(report),
        first=_FIRST,
        rest=_REST,
        costs=reports.costs(report),
        marks=_MARKS,
        timed=reports.timed(report),
        rows=list(_rows(report)),
        charts=list(_charts(report)),
        trade=_accuracy_chart(report),
        many=_MANY,
        torch=torch.__version__,
        version=engine.__version__,
    )


def _charts(report: Report) -> Iterator[dict[str, Any]]:
    events = compactions(report)
    for title, tags in _CHARTS:
        series = {
            name: [(entry["step"], entry[tag]) for entry in report.history if tag in entry]
            for name, tag in tags.items()
        }
        drawn = {name: points for name, points in series.items() if len(points) > 1}
        if drawn:
            yield _chart(title, drawn, events)


def _accuracy_chart(report: Report) -> dict[str, Any] | None:
    """Draw accuracy against cost; None unless both are available."""
    metric, points = against_cost(report.stages)
    if not points:
        return None
    values = [y for _, _, y in points]
    room = 0.15 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    top, low = max(values) + room, min(values) - room
    most = max(x for _, x, _ in points)
    return {
        "metric": metric,
        "names": [f"{name} ({human(macs)} MACs, {value:.4g})" for name, macs, value in points],
        "ticks": [f"{y:.3g}" for y in (top, (top + low) / 2, low)],
        "macs": ["0", f"{human(0.5 * most / 0.94)} MACs", human(most / 0.94)],
        "picture": Markup(svg.scatter(points, top, low)),
    }


def compactions(report: Report) -> list[float]:
    """Return the optimizer steps at which the model was compacted.

    Args:
        report: the report.
    """
    sizes = [(entry["step"], entry["complexity/macs"]) for entry in report.history if "complexity/macs" in entry]
    return [step for (_, before), (step, after) in zip(sizes, sizes[1:], strict=False) if after < before]


def _chart(title: str, series: Mapping[str, svg.Points], events: list[float]) -> dict[str, Any]:
    top = max(y for points in series.values() for _, y in points)
    steps = [x for points in series.values() for x, _ in points]
    first, last = min(steps), max(steps)
    return {
        "title": title,
        "names": list(series),
        "events": events,
        "ticks": [f"{y:.0%}" if "share" in series else human(y) for y in (top, top / 2, 0)],
        "steps": [f"step {first:,.0f}", f"{(first + last) / 2:,.0f}", f"{last:,.0f}"],
        "picture": Markup(svg.lines(series, events=events)),
    }


def _rows(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the rows of layers, with the lanes of coupled layers and a bar of the remaining channels."""
    order = [layer.name for layer in report.before.layers if layer.channels]
    rails = svg.rails([axis.layers for axis in report.before.axes if axis.reason is None], order)
    for name, (kept, size) in reports.kept_channels(report).items():
        label = f"{kept} of {size}" if kept < size else f"all {size}"
        bar = Markup(svg.bar(kept / size, label))
        yield {"rail": Markup(rails[name]), "name": name, "bar": bar, "label": label}
