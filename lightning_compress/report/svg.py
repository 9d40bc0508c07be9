"""Inline SVG figures for the report: no scripts, colours from the page, readable at any width.

Widths are percentages and heights are pixels, so that figures fill their container without scaling text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain

from engine.plots import lanes

Points = Sequence[tuple[float, float]]

_LANE = 14  # pixels between two lanes


def bar(share: float, label: str) -> str:
    """Draw a bar, filled up to ``share`` of its length.

    Args:
        share: fraction in [0, 1].
        label: label for screen readers.

    Example:
        >>> bar(0.25, "1 of 4").count("<rect")
        2
    """
    return (
        f'<svg class="bar" role="img" aria-label="{escape(label)}" width="100%" height="10">'
        f'<rect class="gone" width="100%" height="10" rx="3"/>'
        f'<rect class="kept" width="{100 * share:.2f}%" height="10" rx="3"/></svg>'
    )


def lines(series: Mapping[str, Points], height: int = 150, events: Sequence[float] = ()) -> str:
    """Draw lines over optimizer steps, from zero upwards.

    Args:
        series: points (step, value) by name; the first line is solid, the others are dashed.
        height: height in pixels.
        events: steps to mark by a vertical line.

    Returns:
        An SVG element without axis labels.

    Example:
        >>> lines({"now": [(0, 1.0), (5, 2.0)]}).count("<polyline")
        1
    """
    xs = [x for x, _ in chain(*series.values())]
    first, last = min(xs), max(xs)
    top = max(y for _, y in chain(*series.values())) or 1.0
    drawn = []
    for number, points in enumerate(series.values()):
        places = " ".join(f"{_part(x, first, last):.2f},{100 - 96 * y / top:.2f}" for x, y in points)
        drawn.append(f'<polyline class="line line{number}" points="{places}"/>')
    for x in (f"{_part(step, first, last):.2f}" for step in events):
        drawn.append(f'<path class="event" d="M{x} 0V100"/>')
    label = escape(", ".join(series))
    return (
        f'<svg class="lines" role="img" aria-label="{label}" width="100%" height="{height}" '
        f'viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<path class="grid" d="M0 4H100M0 52H100M0 99.6H100"/>{"".join(drawn)}</svg>'
    )


def scatter(points: Sequence[tuple[str, float, float]], top: float, low: float, height: int = 170) -> str:
    """Draw points (name, x, y), connected in order; x starts at zero.

    Args:
        points: at least one point.
        top: y at the upper edge.
        low: y at the lower edge.
        height: height in pixels.

    Returns:
        An SVG element without axis labels and names.

    Example:
        >>> scatter([("dense", 9, 0.9), ("small", 3, 0.8)], 1.0, 0.5).count("<circle")
        2
    """
    widest = max(x for _, x, _ in points) or 1.0
    span = (top - low) or 1.0
    places = [(94 * x / widest, height - 8 - (height - 16) * (y - low) / span) for _, x, y in points]
    joined = "".join(
        f'<line class="way" x1="{x:.2f}%" y1="{y:.1f}" x2="{to_x:.2f}%" y2="{to_y:.1f}"/>'
        for (x, y), (to_x, to_y) in zip(places, places[1:], strict=False)
    )
    dots = "".join(f'<circle class="set{n}" cx="{x:.2f}%" cy="{y:.1f}" r="5.5"/>' for n, (x, y) in enumerate(places))
    edges = "".join(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>' for y in (8, height // 2, height - 8))
    label = escape(", ".join(name for name, _, _ in points))
    return f'<svg role="img" aria-label="{label}" width="100%" height="{height}">{edges}{joined}{dots}</svg>'


def _part(x: float, first: float, last: float) -> float:
    return 100 * (x - first) / (last - first) if last > first else 50.0


def rails(sets: Sequence[Sequence[str]], order: Sequence[str]) -> dict[str, str]:
    """Draw the coupled layers as lanes, one piece per row of the table of layers.

    Args:
        sets: names of the layers of each set.
        order: the layers in the order of their rows.

    Returns:
        ``{layer: element}``; the elements fill the height of their rows, so that they join.

    Example:
        >>> [piece.count("<circle") for piece in rails([["a", "c"], ["b"]], "abc").values()]
        [1, 1, 1]
    """
    row = {name: number for number, name in enumerate(order)}
    spans = [sorted(row[name] for name in names) for names in sets]
    places = lanes(sets, order)
    width = _LANE * (max(places, default=0) + 1)
    pieces = {}
    for name in order:
        drawn = [_piece(n, places[n], row[name], rows) for n, rows in enumerate(spans)]
        inner = f'<svg aria-hidden="true" width="{width}" height="100%">{"".join(drawn)}</svg>'
        pieces[name] = f'<span class="rail" style="width:{width}px">{inner}</span>'
    return pieces


def _piece(number: int, lane: int, row: int, rows: Sequence[int]) -> str:
    first, last, x = rows[0], rows[-1], _LANE * (lane + 0.5)
    colour = f'class="set{number % 8}"'
    start, end = ("50%" if row == first else "0"), ("50%" if row == last else "100%")
    line = (
        f'<line {colour} x1="{x}" x2="{x}" y1="{start}" y2="{end}"/>' if first <= row <= last and first < last else ""
    )
    return line + (f'<circle {colour} cx="{x}" cy="50%" r="4.5"/>' if row in rows else "")
