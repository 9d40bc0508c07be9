"""Output of the report in the terminal, with `rich` or as plain text."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from lightning_compress.report.brief import ROWS, brief, rest
from lightning_compress.report.content import Report, Section, timed
from lightning_compress.report.text import plain
from lightning_compress.trainer.packages import MisconfigurationException

KINDS = ("rich", "plain", "none")
_STYLES = {"good": "bold green", "fair": "bold yellow", "bad": "bold red"}


def check(kind: str) -> None:
    """Check a kind of output.

    Raises:
        MisconfigurationException: for an unknown kind, and for ``"rich"`` if the package is missing.

    Example:
        >>> check("plain")
    """
    if kind not in KINDS:
        raise MisconfigurationException(f"`terminal` must be one of {', '.join(map(repr, KINDS))}; got {kind!r}.")
    if kind == "rich" and importlib.util.find_spec("rich") is None:
        raise MisconfigurationException(
            "`terminal='rich'` needs the package rich, which is not installed. Install the extra, "
            "pip install 'lightning-compress[report]', or choose `terminal='plain'`."
        )


def show(report: Report, kind: str, console: Any = None, where: str = "") -> None:
    """Print a short form of the report: the costs and the most important layers.

    Args:
        report: the report.
        kind: ``"rich"``, ``"plain"``, or ``"none"``.
        console: a ``rich`` console; None: standard output.
        where: path of the page with the full report.
    """
    check(kind)
    last = rest(report, where) if where else ""
    if kind == "plain":
        sys.stdout.write("\n\n".join(filter(None, (plain(report, brief(report)), last))) + "\n")
    elif kind == "rich":
        console = importlib.import_module("rich.console").Console() if console is None else console
        console.rule(f"Compression of {report.model}")
        mark, verdict = report.verdict
        console.print(verdict, style=_STYLES[mark], markup=False, highlight=False)
        slower = report.latency is not None and report.latency.is_slower
        console.print(timed(report), style=_STYLES["bad"] if slower else "", markup=False, highlight=False)
        for section in brief(report):
            console.print(table(section))
        console.print(last, markup=False, highlight=False, soft_wrap=True)


def table(section: Section) -> Any:
    """Convert a section to a table of `rich`.

    Args:
        section: a section with rows.
    """
    text = importlib.import_module("rich.text").Text
    rich_table = importlib.import_module("rich.table").Table(
        title=section.title,
        title_justify="left",
        title_style="bold",
        caption=section.lead if len(section.rows) == ROWS else None,
        caption_justify="left",
    )
    for number, head in enumerate(section.columns):
        rich_table.add_column(head, justify="right" if section.numbers and number else "left", overflow="fold")
    for row in section.rows:
        rich_table.add_row(*map(text, row))
    return rich_table
