"""The report in the terminal."""

from __future__ import annotations

import dataclasses
import importlib.util
import io

import pytest

from lightning_compress.report import terminal
from lightning_compress.report.brief import brief
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.reports import compacted, masked


@pytest.mark.parametrize("width", [60, 200])
def test_rich_shows_each_table_whole(width: int) -> None:
    """Nothing is cut off at any width: long cells go on in the next line."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=width)
    terminal.show(compacted(), "rich", console)
    text = console.file.getvalue()
    shown = [section.title for section in brief(compacted())]
    assert all(title in text for title in shown) and "…" not in text and "first.weight" not in text
    assert all(len(line) <= width for line in text.splitlines())


def test_rich_takes_no_markup_from_names() -> None:
    """Square brackets stay."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=200)
    terminal.show(dataclasses.replace(compacted(), metrics={"[bold]acc": 0.5}), "rich", console)
    assert "[bold]acc" in console.file.getvalue()


def test_plain_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """And "none" writes nothing."""
    terminal.show(masked(), "plain")
    assert "Not compacted. It differs at <node>." in capsys.readouterr().out
    terminal.show(masked(), "none")
    assert capsys.readouterr().out == ""


def test_without_rich_the_error_says_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, or plain text: nothing is chosen in silence."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match=r"lightning-compress\[report\].*terminal='plain'"):
        terminal.check("rich")
    terminal.check("plain")


def test_an_unknown_kind() -> None:
    """It lists the kinds."""
    with pytest.raises(MisconfigurationException, match="'rich', 'plain', 'none'"):
        terminal.check("html")
