"""The report in few lines."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from torch import nn

import engine
from lightning_compress.report import terminal
from lightning_compress.report.brief import ROWS, brief
from lightning_compress.report.content import Report
from lightning_compress.report.survey import survey
from tests.lightning_compress.reports import compacted


def deep() -> Report:
    """A chain of 54 layers, of which the widest lose half."""
    widths = [8] * 40 + [32] * 14
    layers = [nn.Linear(a, b) for a, b in zip([8, *widths], [*widths, 4], strict=True)]
    net, x = nn.Sequential(*layers[:54]), torch.rand(1, 8)
    before = survey(net, x)
    groups = engine.dependency_groups(net, x)
    keep = {group.name: torch.arange(32) < 16 for group in groups if group.size == 32 and not group.reason}
    speedup = engine.ModelSpeedup(net, x, engine.group_masks(groups, keep), confidence=1)
    speedup.speedup_model()
    return Report("Chain", before, survey(net, x), speedup.plan, speedup.certificate, metrics={"val_acc": 0.9})


@pytest.mark.parametrize("kind", ["rich", "plain"])
def test_fifty_four_layers_fit_on_a_screen(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under fifty lines, with the layers that changed most, and the page that has the rest."""
    console = None
    if kind == "rich":
        console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    report = deep()
    assert len(report.before.layers) == 54
    terminal.show(report, kind, console, where="runs/compression.html")
    text = capsys.readouterr().out if console is None else console.file.getvalue()
    assert len(text.splitlines()) < 50
    assert "All 54 layers" in text and "runs/compression.html" in text and "10 of 54 layers" in text


def test_the_layers_that_changed_most_are_shown() -> None:
    """In the order of the model; the narrow ones at its start changed nothing."""
    (section,) = (section for section in brief(deep()) if section.title == "Layers")
    numbers = [int(row[0].split()[0]) for row in section.rows]
    assert len(numbers) == ROWS and numbers == sorted(numbers) and numbers[0] >= 40


def test_short_tables_are_whole() -> None:
    """Nothing is cut where there are ten rows or fewer."""
    report = compacted()
    (section,) = (section for section in brief(report) if section.title == "Layers")
    assert len(section.rows) == len(report.before.layers) and section.lead == "Each layer before and after."


def test_many_metrics_are_cut() -> None:
    """Ten of them, and how many there are."""
    report = dataclasses.replace(compacted(), metrics={f"m{n}": 0.5 for n in range(30)})
    (section,) = (section for section in brief(report) if section.title == "Metrics")
    assert len(section.rows) == ROWS and section.lead.endswith("The first 10 of 30.")
