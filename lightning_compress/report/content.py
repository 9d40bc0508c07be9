"""The report on a compression: its data, and its sections as tables and text, which each form of output renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import engine
from lightning_compress.report.latency import Comparison
from lightning_compress.report.survey import Axis, Layer, Survey


@dataclass(frozen=True)
class Report:
    """What became of a model.

    Attributes:
        model: its class.
        before: the model as it was before training.
        after: the model as it is now.
        plan: what was removed; None: nothing was.
        certificate: the verdict on it; None: nothing was removed.
        predicted: multiply-accumulates and parameters that compaction would leave, where none took place.
        note: why nothing was removed, where that is known.
        history: what was measured over time, as ``ComplexityMonitor.history``.
        metrics: what the model logged last, by name.
        settings: arguments by callback.
        latency: forward passes of the masked and the compacted network, where they were timed.
        not_timed: why they were not, where that was asked for.
        part: path of the part of the model that plan and certificate speak of; ``""`` is all of it.
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
    part: str = ""

    @property
    def verdict(self) -> tuple[str, str]:
        """``("good" | "fair" | "bad", sentence)``."""
        if self.plan is None:
            rest = self.note or "Nothing is masked that could be removed, or there is no ModelCompaction."
            return "bad" if self.note else "fair", f"Not compacted. {rest}"
        if self.certificate is None or not self.certificate.verified:
            return "fair", "Compacted; the numbers were not compared, only the shapes."
        error = f"{self.certificate.max_error:.1e}" if self.certificate.max_error else "0"
        return "good", f"Compacted: it computes what the masked model computed (relative error {error}, verified)."


@dataclass(frozen=True)
class Section:
    """A part of the report: a table, or text as it stands, or both.

    Attributes:
        title: its heading.
        lead: what it says, in a sentence or two.
        columns: heads of the table; those after the first are numbers where ``numbers``.
        rows: cells of the table.
        text: text with line breaks that count.
        numbers: whether all columns after the first are aligned right.
    """

    title: str
    lead: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""
    numbers: bool = False


def human(count: float) -> str:
    """A number in three digits or so.

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
    """How a cost changed, in percent of what it was.

    Example:
        >>> change(200, 50), change(3, 3), change(0, 0)
        ('−75.0 %', '±0 %', '±0 %')
    """
    if before == after or not before:
        return "±0 %"
    percent = 100 * (after - before) / before
    return f"{'−' if percent < 0 else '+'}{abs(percent):.1f} %"


def costs(report: Report) -> list[tuple[str, str, str, str]]:
    """Rows (quantity, before, after, change) of the summary; latency where it was measured."""
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
    """How the forward passes were timed, or why they were not; ``""`` where nobody asked."""
    if report.latency is not None:
        return f"Timed right after the compaction: {report.latency}."
    return f"Not timed: {report.not_timed}." if report.not_timed else ""


def _bytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _ms(duration: float) -> str:
    return f"{duration:.3g} ms"


def layers(report: Report) -> list[tuple[Layer, Layer | None]]:
    """Each layer before, and after; None where it is gone."""
    after = {layer.name: layer for layer in report.after.layers}
    return [(layer, after.get(layer.name)) for layer in report.before.layers]


def axes(report: Report) -> list[tuple[Axis, int]]:
    """Each axis before, and how many of its channels are left (or would be, under the masks)."""
    left = {axis.name: axis.kept for axis in report.after.axes}
    return [(axis, left.get(axis.name, axis.kept)) for axis in report.before.axes]


def kept_channels(report: Report) -> dict[str, tuple[int, int]]:
    """``{layer: (output channels that are left, or would be under the masks; those before)}``.

    Args:
        report: the report.
    """
    counts = {}
    for old, new in layers(report):
        if old.channels:
            left = old.channels if new is None else new.channels
            if report.plan is None:  # nothing is removed: what the masks say
                mine = [(axis.size, kept) for axis, kept in axes(report) if old.name in axis.layers]
                size = sum(n for n, _ in mine)
                left = old.channels * sum(kept for _, kept in mine) // size if size else left
            counts[old.name] = (left, old.channels)
    return counts


def sections(report: Report) -> list[Section]:
    """All sections that have something to say.

    Args:
        report: the report.

    Returns:
        Summary, metrics, layers, axes, what stays whole, certificate, plan, settings.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> found = survey(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)), ones(1, 1, 8, 8))
        >>> [section.title for section in sections(Report("Net", found, found))]
        ['Summary', 'Layers', 'Coupled layers', 'Not prunable, and why']
    """
    all_sections = [
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


def _predicted(report: Report) -> Section:
    if report.predicted is None or report.predicted == (report.before.macs, report.before.params):
        return Section("")
    (macs, params), one = report.predicted, report.before
    pairs = (("MACs per sample", one.macs, macs), ("Parameters", one.params, params))
    rows = tuple((name, human(old), human(new), change(old, new)) for name, old, new in pairs)
    lead = "The model is masked. This is what removing what is masked would leave."
    return Section("After compaction", lead, ("", "before", "predicted", "change"), rows, numbers=True)


def _metrics(report: Report) -> Section:
    rows = tuple((name, f"{value:.5g}") for name, value in report.metrics.items())
    return Section("Metrics", "Logged last, before the compaction.", ("metric", "value"), rows, numbers=True)


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
    """A count before and after.

    Example:
        >>> arrow(64, 32), arrow(10, 10), arrow(0, 0)
        ('64 → 32', '10', '–')
    """
    if before == after:
        return human(before) if before else "–"
    return f"{human(before)} → {human(after)}"


def _axes(report: Report) -> Section:
    rows = tuple(
        (axis.name, ", ".join(axis.layers), f"{left} of {axis.size}")
        for axis, left in axes(report)
        if axis.reason is None
    )
    lead = "The layers of a row put out the same channels (or heads), and lose the same ones."
    return Section("Coupled layers", lead, ("group", "layers", "kept"), rows)


def _frozen(report: Report) -> Section:
    rows = tuple(
        (axis.name, ", ".join(axis.layers), str(axis.size), axis.reason) for axis, _ in axes(report) if axis.reason
    )
    lead = "Channels that cannot be removed, with the reason and, where there is one, the line of the source."
    return Section("Not prunable, and why", lead, ("group", "layers", "channels", "reason"), rows)


def _certificate(report: Report) -> Section:
    c = report.certificate
    if c is None:
        return Section("")
    exact = "eval mode and train mode" if c.exact_in_train else "eval mode; constants were folded into biases"
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
        f"Masked and compacted model{_of(report)} were run on the same random inputs before the compaction took effect."
    )
    return Section("Certificate", lead if c.verified else "", ("", "verdict"), tuple(rows))


def _plan(report: Report) -> Section:
    if report.plan is None or report.plan.is_empty:
        return Section("")
    cuts = report.plan.slices
    rows = tuple((name, _shape(cut.before), _shape(cut.shape)) for name, cut in cuts.items())
    rest = str(report.plan).splitlines()[1 + len(cuts) if cuts else 0 :]
    lead = f"What was cut from which tensor{_of(report)}, and where constants went."
    return Section("Plan", lead, ("tensor", "before", "after"), rows, "\n".join(rest), numbers=True)


def _of(report: Report) -> str:
    return f" of `{report.part}`" if report.part else ""


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _settings(report: Report) -> Section:
    rows = tuple(
        (callback, name, str(value)) for callback, own in report.settings.items() for name, value in own.items()
    )
    return Section("Settings", "Arguments of the callbacks.", ("callback", "argument", "value"), rows)


def markdown(section: Section) -> str:
    """A section as Markdown, for loggers that show text.

    Example:
        >>> print(markdown(Section("Sizes", columns=("layer", "size"), rows=(("a|b", "3"),), numbers=True)))
        | layer | size |
        |---|---:|
        | a\\|b | 3 |
    """
    parts = [section.lead] if section.lead else []
    if section.rows:
        ends = ["---", *["---:" if section.numbers else "---"] * (len(section.columns) - 1)]
        rows = [section.columns, *section.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append("\n".join([lines[0], f"|{'|'.join(ends)}|", *lines[1:]]))
    if section.text:
        parts.append("\n".join(f"    {line}" for line in section.text.splitlines()))
    return "\n\n".join(parts)


def plain(report: Report, shown: Sequence[Section] | None = None) -> str:
    """The report as plain text.

    Args:
        report: the report.
        shown: its sections; None: all.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> found = survey(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), ones(1, 4))
        >>> print(plain(Report("Net", found, found)).splitlines()[0])
        Compression of Net
    """
    texts = [plain_section(section) for section in (sections(report) if shown is None else shown)]
    return "\n\n".join([f"Compression of {report.model}", *texts])


def plain_section(section: Section) -> str:
    """A section as plain text, its table in columns.

    Example:
        >>> print(plain_section(Section("Sizes", columns=("layer", "size"), rows=(("conv", "3"),), numbers=True)))
        Sizes
        =====
        layer  size
        conv      3
    """
    rows = [section.columns, *section.rows] if section.rows else []
    widths = [max(len(row[n]) for row in rows) for n in range(len(section.columns))] if rows else []
    lines = ["  ".join(_cell(cell, n, widths, section) for n, cell in enumerate(row)).rstrip() for row in rows]
    parts = (section.title, "=" * len(section.title), section.lead, *lines, section.text)
    return "\n".join(part for part in parts if part)


def _cell(cell: str, column: int, widths: Sequence[int], section: Section) -> str:
    if column + 1 == len(widths) and not section.numbers:
        return cell  # the last column may be long: nothing comes behind it
    return cell.rjust(widths[column]) if column and section.numbers else cell.ljust(widths[column])
