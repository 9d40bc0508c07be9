"""Content of the compression report: its data, and its sections as tables and text for all output formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import engine
from lightning_compress.report.latency import Comparison
from lightning_compress.report.stages import Stage, metrics_of
from lightning_compress.report.survey import Axis, Layer, Survey

_METRICS = 6  # columns of the table of accuracy against cost


@dataclass(frozen=True)
class Report:
    """Data of a compression report.

    Attributes:
        model: class of the model.
        before: survey of the model before training.
        after: survey of the current model.
        plan: what was removed; None if nothing was.
        certificate: verdict of the verification; None if nothing was removed.
        predicted: multiply-accumulates and parameters after compaction, if the model was not compacted.
        note: why nothing was removed, if known.
        history: measurements over time, as in ``ComplexityMonitor.history``.
        metrics: the latest logged metrics, by name.
        settings: arguments by callback.
        latency: timed forward passes of the masked and the compacted network, if measured.
        not_timed: why they were not measured, if a callback needed them.
        stages: accuracy against cost, from the dense network on.
        facts: date, device and folder of the run, by name.
        part: path of the submodule that plan and certificate refer to; ``""`` is the model itself.
    """

    model: str
    before: Survey
    after: Survey
    plan: engine.Plan | None = None
    certificate: engine.Certificate | None = None
    predicted: tuple[int, int] | None = None
    note: str = ""
    history: Sequence[Mapping[str, float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    latency: Comparison | None = None
    not_timed: str = ""
    stages: Sequence[Stage] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    part: str = ""

    @property
    def verdict(self) -> tuple[str, str]:
        """``("good" | "fair" | "bad", sentence)``."""
        if self.plan is None:
            rest = self.note or "There are no masked channels to remove, or there is no ModelCompaction."
            return "bad" if self.note else "fair", f"Not compacted. {rest}"
        if self.certificate is not None and not self.certificate.exact:
            return "fair", "Compacted with ordinary norms: it does not compute the same function as the masked model."
        if self.certificate is None or not self.certificate.verified:
            return "fair", "Compacted; only shapes were compared, not numbers."
        error = f"{self.certificate.max_error:.1e}" if self.certificate.max_error else "0"
        return (
            "good",
            f"Compacted: it computes the same function as the masked model (relative error {error}, verified).",
        )


@dataclass(frozen=True)
class Section:
    """A section of the report with a table, preformatted text, or both.

    Attributes:
        title: heading.
        lead: introductory sentences.
        columns: headings of the table's columns.
        rows: cells of the table.
        text: preformatted text.
        numbers: whether all columns after the first contain numbers, which are aligned right.
    """

    title: str
    lead: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""
    numbers: bool = False


def human(count: float) -> str:
    """Format a number with about three digits.

    Example:
        >>> human(950), human(25_557_032), human(4_089_184_256)
        ('950', '25.6 M', '4.09 G')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{count:.3g}"


def change(before: float, after: float) -> str:
    """Format the relative change of a cost in percent.

    Example:
        >>> change(200, 50), change(3, 3), change(0, 0)
        ('−75.0 %', '±0 %', '±0 %')
    """
    if before == after or not before:
        return "±0 %"
    percent = 100 * (after - before) / before
    return f"{'−' if percent < 0 else '+'}{abs(percent):.1f} %"


def costs(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the rows (quantity, before, after, change) of the summary, with latency if measured."""
    one, two = report.before, report.after
    rows = [
        ("MACs per sample", human(one.macs), human(two.macs), change(one.macs, two.macs)),
        ("Parameters", human(one.params), human(two.params), change(one.params, two.params)),
        ("Size in memory", _bytes(one.size), _bytes(two.size), change(one.size, two.size)),
    ]
    if report.latency is not None:
        masked, compacted = report.latency.masked.median, report.latency.compacted.median
        slower = ", slower" if report.latency.is_slower else ""
        rows.append(("Forward pass", _ms(masked), _ms(compacted), change(masked, compacted) + slower))
    return rows


def timed(report: Report) -> str:
    """Say how the forward passes were timed, or why they were not; ``""`` if no callback needed them."""
    if report.latency is not None:
        return f"Timed right after the compaction: {report.latency}."
    return f"Not timed: {report.not_timed}." if report.not_timed else ""


def _bytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _ms(duration: float) -> str:
    return f"{duration:.3g} ms"


def layers(report: Report) -> list[tuple[Layer, Layer | None]]:
    """Return each layer before and after; None if it was removed."""
    after = {layer.name: layer for layer in report.after.layers}
    return [(layer, after.get(layer.name)) for layer in report.before.layers]


def axes(report: Report) -> list[tuple[Axis, int]]:
    """Return each axis before, with the number of its channels that remain, or would remain under the masks."""
    kept = {axis.name: axis.kept for axis in report.after.axes}
    return [(axis, kept.get(axis.name, axis.kept)) for axis in report.before.axes]


def kept_channels(report: Report) -> dict[str, tuple[int, int]]:
    """Return ``{layer: (output channels that remain, or would remain under the masks; channels before)}``.

    Args:
        report: the report.
    """
    counts = {}
    for old, new in layers(report):
        if old.channels:
            remaining = old.channels if new is None else new.channels
            if report.plan is None:  # nothing was removed, so predict it from the masks
                mine = [(axis.size, kept) for axis, kept in axes(report) if old.name in axis.layers]
                size = sum(n for n, _ in mine)
                remaining = old.channels * sum(kept for _, kept in mine) // size if size else remaining
            counts[old.name] = (remaining, old.channels)
    return counts


def sections(report: Report) -> list[Section]:
    """Return all sections that are not empty.

    Args:
        report: the report.

    Returns:
        Summary, metrics, layers, coupled layers, layers that cannot be pruned, certificate, plan, settings.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> before = survey(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)), ones(1, 1, 8, 8))
        >>> [section.title for section in sections(Report("Net", before, before))]
        ['Summary', 'Layers', 'Coupled layers', 'Not prunable, and why']
    """
    all_sections = [
        _stages(report),
        Section(
            "Summary",
            " ".join(filter(None, (report.verdict[1], timed(report)))),
            ("", "before", "after", "change"),
            tuple(costs(report)),
            numbers=True,
        ),
        _predicted(report),
        _metrics(report),
        _layers(report),
        _axes(report),
        _frozen(report),
        _certificate(report),
        _plan(report),
        _settings(report),
    ]
    return [section for section in all_sections if section.rows or section.text]


def _stages(report: Report) -> Section:
    names = metrics_of(report.stages)[:_METRICS]
    rows = tuple(
        (
            stage.name,
            *("–" if cost is None else human(cost) for cost in (stage.macs, stage.params)),
            *(f"{stage.metrics[name]:.4g}" if name in stage.metrics else "–" for name in names),
        )
        for stage in report.stages
    )
    exact = report.certificate is None or report.certificate.exact
    lead = (
        "Metrics at the end of an epoch: the last one before pruning, the first and the last one at final sparsity. "
        "The compacted network computes "
        + ("the same function as the recovered one." if exact else "a different function: validate it.")
    )
    return Section(
        "Accuracy against cost", lead, ("network", "MACs", "parameters", *names), rows if names else (), numbers=True
    )


def _predicted(report: Report) -> Section:
    if report.predicted is None or report.predicted == (report.before.macs, report.before.params):
        return Section("")
    (macs, params), one = report.predicted, report.before
    pairs = (("MACs per sample", one.macs, macs), ("Parameters", one.params, params))
    rows = tuple((name, human(old), human(new), change(old, new)) for name, old, new in pairs)
    lead = "The model is masked. Compaction would reduce it to this size."
    return Section("After compaction", lead, ("", "before", "predicted", "change"), rows, numbers=True)


def _metrics(report: Report) -> Section:
    rows = tuple((name, f"{value:.5g}") for name, value in report.metrics.items())
    return Section("Metrics", "Last logged before the compaction.", ("metric", "value"), rows, numbers=True)


def _layers(report: Report) -> Section:
    rows = []
    for old, new in layers(report):
        gone = Layer(old.name, old.kind, 0, 0, 0)
        pairs = [(getattr(old, key), getattr(new or gone, key)) for key in ("channels", "params", "macs")]
        name = f"{old.name or '(the model)'} ({old.kind})"
        rows.append((name, *(arrow(*pair) for pair in pairs)))
    heads = ("layer", "output channels", "parameters", "MACs")
    return Section("Layers", "Each layer before and after.", heads, tuple(rows), numbers=True)


def arrow(before: int, after: int) -> str:
    """Format a count before and after.

    Example:
        >>> arrow(64, 32), arrow(10, 10), arrow(0, 0)
        ('64 → 32', '10', '–')
    """
    if before == after:
        return human(before) if before else "–"
    return f"{human(before)} → {human(after)}"


def _axes(report: Report) -> Section:
    rows = tuple(
        (axis.name, ", ".join(axis.layers), f"{kept} of {axis.size}")
        for axis, kept in axes(report)
        if axis.reason is None
    )
    lead = "The layers of a row produce the same channels (or heads), and lose the same ones."
    return Section("Coupled layers", lead, ("group", "layers", "kept"), rows)


def _frozen(report: Report) -> Section:
    rows = tuple(
        (axis.name, ", ".join(axis.layers), str(axis.size), axis.reason) for axis, _ in axes(report) if axis.reason
    )
    lead = "Channels that cannot be removed, with the reason and, if there is one, the source line."
    return Section("Not prunable, and why", lead, ("group", "layers", "channels", "reason"), rows)


def _certificate(report: Report) -> Section:
    c = report.certificate
    if c is None:
        return Section("")
    exact = (
        "eval mode and train mode"
        if c.exact_in_train
        else "eval mode; constants were folded into biases, or norms changed their scale"
    )
    rows = [("Verified by numbers", "yes" if c.verified else "no"), ("Exact in", exact)]
    if c.verified:
        shapes = ", ".join(_shape(shape) for shape in dict.fromkeys(c.shapes))
        rows += [
            ("Largest relative error", f"{c.max_error:.1e} (tolerance {c.tolerance:.0e}, {c.dtype})"),
            ("Compared", f"the outputs and {c.compared} inner tensors, channel by channel"),
            ("Inputs", f"{c.samples} random samples, of shapes {shapes}"),
        ]
    rows += [("Note", note) for note in c.notes]
    lead = (
        f"The masked and the compacted model{_of(report)} ran on the same random inputs before the compaction took "
        "effect."
    )
    return Section("Certificate", lead if c.verified else "", ("", "verdict"), tuple(rows))


def _plan(report: Report) -> Section:
    if report.plan is None or report.plan.is_empty:
        return Section("")
    cuts = report.plan.slices
    rows = tuple((name, _shape(cut.before), _shape(cut.shape)) for name, cut in cuts.items())
    rest = str(report.plan).splitlines()[1 + len(cuts) if cuts else 0 :]
    lead = f"Tensors{_of(report)} that were narrowed, and the constants that were folded."
    return Section("Plan", lead, ("tensor", "before", "after"), rows, "\n".join(rest), numbers=True)


def _of(report: Report) -> str:
    return f" of `{report.part}`" if report.part else ""


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _settings(report: Report) -> Section:
    rows = tuple(
        (callback, name, str(value)) for callback, own in report.settings.items() for name, value in own.items()
    )
    return Section(
        "Settings", "Arguments of the callbacks that differ from the defaults.", ("callback", "argument", "value"), rows
    )


def gains(report: Report) -> dict[str, float]:
    """Return the gains as numbers for the summary of a run.

    Args:
        report: the report.

    Returns:
        ``compression/macs_left`` and ``compression/params_left`` (fractions of the dense network),
        ``compression/macs``, ``compression/params``, ``compression/verified`` (1 or 0) if the model was compacted,
        ``compression/speedup`` (masked by compacted) if both were timed, and the metrics of the dense and of the
        compacted network as ``compression/<metric>_dense`` and ``compression/<metric>``.
    """
    before, after = report.before, report.after
    numbers: dict[str, float] = {
        "compression/macs": after.macs,
        "compression/params": after.params,
        "compression/macs_left": after.macs / max(before.macs, 1),
        "compression/params_left": after.params / max(before.params, 1),
    }
    if report.plan is not None:
        numbers["compression/verified"] = float(report.certificate is not None and report.certificate.verified)
    if report.latency is not None:
        numbers["compression/speedup"] = report.latency.masked.median / report.latency.compacted.median
    if report.stages:
        numbers |= {f"compression/{name}": value for name, value in report.stages[-1].metrics.items()}
        if report.stages[0].name == "dense":
            numbers |= {f"compression/{name}_dense": value for name, value in report.stages[0].metrics.items()}
    return numbers
