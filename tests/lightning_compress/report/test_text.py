"""The report as Markdown and as plain text."""

from __future__ import annotations

from lightning_compress.report.content import Section, sections
from lightning_compress.report.text import markdown, plain
from tests.lightning_compress.reports import compacted


def test_plain_text_holds_all_or_the_sections_that_are_shown() -> None:
    """In columns."""
    text = plain(compacted())
    assert all(section.title in text for section in sections(compacted()))
    assert "Plan" not in plain(compacted(), sections(compacted())[:3])
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    assert len({len(line) for line in lines[start : start + 6]}) == 1  # aligned right


def test_markdown_escapes_the_bars_of_a_table() -> None:
    """A cell stays a cell; text is shown as it stands."""
    text = markdown(Section("T", "Lead.", ("a", "b"), (("x|y", "z"),), "one\n  two"))
    assert text == "Lead.\n\n| a | b |\n|---|---|\n| x\\|y | z |\n\n    one\n      two"
