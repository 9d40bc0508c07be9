"""The report as one HTML file that needs nothing else: no scripts, no network, light and dark, any width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import torch

from engine.files.atomic import next_version, replacing, unwritable
from lightning_compress.report import content as reports
from lightning_compress.report import svg
from lightning_compress.report.content import Report, Section, human

_CHARTS = (
    ("MACs per sample", {"now": "complexity/macs", "after compaction": "complexity/macs_compacted"}),
    ("Parameters", {"now": "complexity/params", "after compaction": "complexity/params_compacted"}),
    ("Masked channels", {"share": "sparsity/channels"}),
)
_MARKS = {"−": "better", "+": "worse"}  # a cost that rose is a loss
_MANY = 40  # rows, from which on a part of the page is closed until it is asked for


def write(report: Report, path: Path) -> Path:
    """Write the page, under a name that no file has: ``-v1``, ``-v2``, … behind it where there is one.

    Args:
        report: the report.
        path: where to; its folder is made.

    Returns:
        The file.

    Raises:
        CheckpointError: where it cannot be written.
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
    """The page.

    Args:
        report: the report.

    Returns:
        A whole HTML document.

    Example:
        >>> from torch import nn, ones
        >>> from lightning_compress.report.survey import survey
        >>> found = survey(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), ones(1, 4))
        >>> page = html(Report("Net<1>", found, found))
        >>> page.startswith("<!doctype html>"), "Net&lt;1&gt;" in page, "<script" in page
        (True, True, False)
    """
    title = f"Compression of {escape(report.model)}"
    style = files("lightning_compress.report").joinpath("report.css").read_text(encoding="utf-8")
    mark, verdict = report.verdict
    sections = {section.title: section for section in reports.sections(report)}
    body = [
        f'<header><h1>{title}</h1><p class="verdict {mark}">{escape(verdict)}</p></header>',
        _cards(report),
        *(_section(sections[name]) for name in ("After compaction", "Metrics") if name in sections),
        _charts(report),
        _picture(report),
        _layers(report),
        *(_section(sections[name]) for name in ("Not prunable, and why",) if name in sections),
        *(_section(sections[name]) for name in ("Certificate", "Plan", "Settings") if name in sections),
        f"<footer>torch {escape(torch.__version__)}. One multiply-accumulate (MAC) is two FLOPs. "
        f"{escape(reports.timed(report))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>\n{style}</style></head>\n<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def _cards(report: Report) -> str:
    cards = "".join(
        f'<div class="card"><h3>{escape(name)}</h3><p class="figure">{escape(after)}</p>'
        f'<p class="was">was {escape(before)} <b class="{_MARKS.get(change[0], "same")}">{escape(change)}</b></p></div>'
        for name, before, after, change in reports.costs(report)
    )
    return f'<div class="cards">{cards}</div>'


def _charts(report: Report) -> str:
    charts = []
    for title, tags in _CHARTS:
        series = {
            name: [(entry["step"], entry[tag]) for entry in report.history if tag in entry]
            for name, tag in tags.items()
        }
        drawn = {name: points for name, points in series.items() if len(points) > 1}
        if drawn:
            charts.append(_chart(title, drawn))
    if not charts:
        return ""
    return f'<section><h2>Over the training</h2><div class="charts">{"".join(charts)}</div></section>'


def _chart(title: str, series: Mapping[str, svg.Points]) -> str:
    values = [y for points in series.values() for _, y in points]
    steps = [int(x) for points in series.values() for x, _ in points]
    key = "".join(f'<span class="key key{n}">{escape(name)}</span>' for n, name in enumerate(series))
    top = f"{max(values):.0%}" if "share" in series else human(max(values))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="keys">{key}</div>'
        f'<div class="top">{top}</div>{svg.lines(series)}'
        f'<div class="ends"><span>step {min(steps):,}</span><span>{max(steps):,}</span></div></figure>'
    )


def _picture(report: Report) -> str:
    """Rows of layers, with the lanes of coupled layers and a bar of what each keeps."""
    order = [layer.name for layer in report.before.layers if layer.channels]
    rails = svg.rails([axis.layers for axis in report.before.axes if axis.reason is None], order)
    rows = []
    for name, (left, size) in reports.kept_channels(report).items():
        label = f"{left} of {size}" if left < size else f"all {size}"
        rows.append(
            f'<li>{rails[name]}<span class="name">{_name(name)}</span>'
            f'{svg.bar(left / size, label)}<span class="count">{label}</span></li>'
        )
    lead = (
        "Output channels of each layer that stay. Dots on one line put out the same channels, and can only lose "
        "the same ones; a layer without a dot keeps all it has."
    )
    key = '<span class="key keykept">kept</span><span class="key keygone">removed</span>'
    content = f'<p>{lead} <span class="keys">{key}</span></p><ul class="rows">{"".join(rows)}</ul>'
    return _part("Channels and coupled layers", content, len(rows))


def _layers(report: Report) -> str:
    (section,) = (s for s in reports.sections(report) if s.title == "Layers") if report.before.layers else (None,)
    if section is None:
        return ""
    body = "".join(
        _row(f"{_name(layer.name)} <small>{escape(layer.kind)}</small>", section.columns, row)
        for layer, row in zip(report.before.layers, section.rows, strict=True)
    )
    table = f'<table class="wide numbers">{_head(section.columns)}<tbody>{body}</tbody></table>'
    return _part(section.title, f"<p>{escape(section.lead)}</p>{table}", len(section.rows))


def _section(section: Section) -> str:
    parts = [f"<p>{escape(section.lead)}</p>"] if section.lead else []
    if section.rows:
        kind = "wide" + (" numbers" if section.numbers else "") + (" pairs" if len(section.columns) == 2 else "")
        body = "".join(_row(_name(row[0]), section.columns, row) for row in section.rows)
        parts.append(f'<table class="{kind}">{_head(section.columns)}<tbody>{body}</tbody></table>')
    if section.text:
        parts.append(f"<pre>{escape(section.text)}</pre>")
    return _part(section.title, "".join(parts), max(len(section.rows), section.text.count("\n") * 2))


def _row(head: str, columns: Sequence[str], cells: Sequence[str]) -> str:
    pairs = zip(columns[1:], cells[1:], strict=True)
    rest = "".join(f'<td data-label="{escape(column)}">{_name(cell)}</td>' for column, cell in pairs)
    return f'<tr><th scope="row">{head}</th>{rest}</tr>'


def _head(columns: Iterable[str]) -> str:
    return "<thead><tr>" + "".join(f'<th scope="col">{escape(column)}</th>' for column in columns) + "</tr></thead>"


def _part(title: str, content: str, rows: int) -> str:
    if rows > _MANY:
        return f"<section><details><summary><h2>{escape(title)}</h2></summary>{content}</details></section>"
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _name(name: str) -> str:
    """A name that may break behind its dots and underscores."""
    return escape(name or "(the model)").replace(".", ".<wbr>").replace("_", "_<wbr>").replace("/", "/<wbr>")
