"""The report as Markdown and as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_compress.report.content import Report, Section, sections


def markdown(section: Section) -> str:
    """Format a section as Markdown, for loggers.

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
    """Format the report as plain text.

    Args:
        report: the report.
        shown: its sections; None: all.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> before = survey(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), ones(1, 4))
        >>> print(plain(Report("Net", before, before)).splitlines()[0])
        Compression of Net
    """
    texts = [plain_section(section) for section in (sections(report) if shown is None else shown)]
    return "\n\n".join([f"Compression of {report.model}", *texts])


def plain_section(section: Section) -> str:
    """Format a section as plain text, with its table in columns.

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
        return cell  # the last column needs no padding
    return cell.rjust(widths[column]) if column and section.numbers else cell.ljust(widths[column])
