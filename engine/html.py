"""Tables in HTML, which notebooks show; whatever is put into them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["table"]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    """Return a table with a title, and notes below it.

    Example:
        >>> table("Net<1>", ("layer",), [("conv",)]).count("<td"), "&lt;1&gt;" in table("Net<1>", (), [])
        (1, True)
    """
    left = ' style="text-align:left"'
    head = "".join(f"<th{left}>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td{left}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    rows_of_table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    scrolls = ' style="overflow-x:auto"'
    return f"<div{scrolls}><p><b>{escape(title)}</b></p><table>{rows_of_table}</table>{below}</div>"
