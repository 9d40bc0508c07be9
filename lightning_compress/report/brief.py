"""A short form of the report for a terminal: costs, and the ten most important rows of each table."""

from __future__ import annotations

from dataclasses import replace

from lightning_compress.report.content import Report, Section, axes, layers, sections

ROWS = 10
PAGE_ONLY = ("Coupled layers", "Certificate", "Plan", "Settings")  # sections that the terminal omits


def brief(report: Report) -> list[Section]:
    """Return the sections for a terminal, each with at most ten rows; the lead says how many there are.

    Args:
        report: the report.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> before = survey(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), ones(1, 4))
        >>> [section.title for section in brief(Report("Net", before, before))]
        ['Summary', 'Layers', 'Not prunable, and why']
    """
    return [_cut(section, report) for section in sections(report) if section.title not in PAGE_ONLY]


def _cut(section: Section, report: Report) -> Section:
    count = len(section.rows)
    if count <= ROWS:
        return section
    order = _by_weight(section, report)[:ROWS]
    lead = {
        "Layers": f"The {ROWS} of {count} layers that changed most.",
        "Not prunable, and why": f"The {ROWS} of {count} groups with the most channels.",
    }.get(section.title, f"{section.lead} The first {ROWS} of {count}.")
    return replace(section, lead=lead, rows=tuple(section.rows[row] for row in sorted(order)))


def _by_weight(section: Section, report: Report) -> list[int]:
    """Return the row indices of a section, the most important first."""
    weights = [0.0] * len(section.rows)
    if section.title == "Layers":
        macs, params = max(report.before.macs, 1), max(report.before.params, 1)
        weights = [
            _saved(old.macs, 0 if new is None else new.macs) / macs
            + _saved(old.params, 0 if new is None else new.params) / params
            for old, new in layers(report)
        ]
    elif section.title == "Not prunable, and why":
        weights = [float(axis.size) for axis, _ in axes(report) if axis.reason]
    return sorted(range(len(weights)), key=lambda row: -weights[row])


def _saved(before: int, after: int) -> float:
    """Return the change of a cost, with the cost itself as a tie-breaker."""
    return abs(before - after) + 1e-6 * before


def rest(report: Report, where: str) -> str:
    """Return a sentence that says where the rest of the report is.

    Args:
        report: the report.
        where: the page.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> before = survey(nn.Linear(4, 8), ones(1, 4))
        >>> rest(Report("Net", before, before), "runs/compression.html")
        'All 1 layers, the coupled layers, the certificate, the plan and the settings: runs/compression.html'
    """
    count = len(report.before.layers)
    return f"All {count} layers, the coupled layers, the certificate, the plan and the settings: {where}"
