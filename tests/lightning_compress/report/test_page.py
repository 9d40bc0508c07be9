"""The page of the report."""

from __future__ import annotations

import dataclasses
import html as escaping
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_compress.report import page
from lightning_compress.report.content import Report, sections
from tests.lightning_compress.reports import compacted, masked

VOID = {"meta", "link", "wbr", "br", "rect", "polyline", "path", "line", "circle"}


class Checker(HTMLParser):
    """Collects tags, attributes and text, and holds that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open."""
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing stays open."""
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Read."""
        self.text += data


def checked(report: Report) -> Checker:
    """The page, parsed."""
    checker = Checker()
    checker.feed(page.html(report))
    assert checker.open == []
    return checker


@pytest.mark.parametrize("report", [compacted, masked])
def test_the_page_is_whole_and_needs_nothing_else(report: object) -> None:
    """Tags are balanced; no script, no address, no file besides it."""
    checker = checked(report())  # type: ignore[operator]
    assert "script" not in checker.tags
    addresses = [value for name, value in checker.attributes if name in ("src", "href", "xlink:href")]
    assert addresses == ["data:,"]
    assert not re.search(r"https?:|@import|url\(", page.html(report()))  # type: ignore[operator]


def test_every_cell_of_every_section_is_on_the_page() -> None:
    """Names may break in a line, but are all there."""
    text = checked(compacted()).text
    for section in sections(compacted()):
        if section.title not in ("Summary", "Coupled layers"):  # shown as cards, and in pictures
            assert all(cell in text for row in section.rows for cell in row), section.title
    for layer in compacted().before.layers:
        assert layer.name in text and layer.kind in text


def test_light_dark_and_narrow_are_styled() -> None:
    """Colours follow the reader's setting; a phone gets rows instead of columns."""
    text = page.html(compacted())
    assert "prefers-color-scheme: dark" in text and "max-width: 600px" in text and 'name="viewport"' in text


def test_curves_are_drawn_of_what_was_logged() -> None:
    """MACs now and predicted, and the share of masked channels; nothing without a history."""
    assert page.html(compacted()).count("<polyline") == 3
    assert "Over the training" not in page.html(dataclasses.replace(compacted(), history=()))


def test_names_and_notes_are_escaped() -> None:
    """A node's name holds angle brackets."""
    text = page.html(masked())
    assert "<node>" not in text and escaping.escape("<node>") in text


def test_a_long_table_is_closed_until_asked_for() -> None:
    """From forty rows on."""
    report = compacted()
    many = dataclasses.replace(report, settings={"C": {str(n): n for n in range(50)}})
    assert page.html(many).count("<details>") == page.html(report).count("<details>") + 1


def test_it_is_written_into_a_new_folder(tmp_path: Path) -> None:
    """UTF-8, as its head says."""
    path = tmp_path / "new" / "report.html"
    page.write(compacted(), path)
    assert path.read_text(encoding="utf-8") == page.html(compacted())


def test_accuracy_against_cost_comes_first_and_the_picture_is_open() -> None:
    """Before the cards and the tables; a picture of a hundred layers is not closed."""
    text = page.html(compacted())
    parts = ("Accuracy against cost", 'class="card"', "Channels and coupled", "Over the training")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    layers = tuple(dataclasses.replace(compacted().before.layers[0], name=f"conv{n}") for n in range(100))
    deep = dataclasses.replace(compacted(), before=dataclasses.replace(compacted().before, layers=layers, axes=()))
    picture = page.html(deep).partition("Channels and coupled")[0]
    assert not picture.endswith("<summary><h2>")


def test_the_compaction_is_an_event_in_the_charts() -> None:
    """A vertical line where the model became smaller, in each of them, with its key; the axes have numbers."""
    text = page.html(compacted())
    assert page.compactions(compacted()) == [11] and text.count('class="event"') == 2
    assert "compaction</span>" in text and "<span>400</span><span>200</span><span>0</span>" in text
    assert "<span>step 0</span><span>6</span><span>11</span>" in text


def test_date_device_and_folder_are_at_the_top() -> None:
    """Whoever finds the file knows what it is of."""
    report = dataclasses.replace(compacted(), facts={"date": "2026-01-02", "run": "runs/<1>"})
    head = page.html(report).partition("</header>")[0]
    assert "date: 2026-01-02" in head and "runs/<wbr>&lt;1&gt;" in head
