"""Pictures, and what happens without the package that draws them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.errors import InputError
from engine.plots import dependency_figure, sensitivity_figure

ROWS = {"conv1": {0.1: 0.9, 0.5: 0.4}, "conv2": {0.1: 0.2}}


@pytest.fixture
def drawing() -> None:
    """Skips where matplotlib is not installed."""
    pytest.importorskip("matplotlib")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """``plots`` is what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-compress\[plots\]"):
        sensitivity_figure(ROWS, [0.1, 0.5], 0.9, "heatmap")


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize("kind", ["heatmap", "curves"])
def test_a_table_becomes_a_picture(tmp_path: Path, kind: str) -> None:
    """Written in the format of its ending, with a name for each layer."""
    table = engine.SensitivityTable(ROWS, [0.1, 0.5], 0.9)
    figure = table.plot(tmp_path / "table.png", kind)
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    named = [t.get_text() for t in (axes.get_yticklabels() if kind == "heatmap" else axes.get_legend().get_texts())]
    assert named == ["conv1", "conv2"]


@pytest.mark.usefixtures("drawing")
def test_a_heat_map_has_the_metrics_and_a_gap_where_a_sweep_was_stopped() -> None:
    """Layers down, sparsities across."""
    image = sensitivity_figure(ROWS, [0.1, 0.5], 0.9, "heatmap").axes[0].images[0].get_array()
    assert image.filled(-1).tolist() == [[0.9, 0.4], [0.2, -1]]


@pytest.mark.usefixtures("drawing")
def test_curves_start_at_the_baseline() -> None:
    """At sparsity 0."""
    lines = sensitivity_figure(ROWS, [0.1, 0.5], 0.95, "curves").axes[0].lines
    assert list(lines[0].get_xdata()) == [0.0, 0.1, 0.5] and list(lines[0].get_ydata()) == [0.95, 0.9, 0.4]


@pytest.mark.usefixtures("drawing")
def test_tensorboard_gets_the_picture(tmp_path: Path) -> None:
    """Under its own tag."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        engine.SensitivityTable(ROWS, [0.1, 0.5], 0.9).plot(kind="curves", writer=writer)
    assert events.EventAccumulator(str(tmp_path)).Reload().Tags()["images"] == ["sensitivity/curves"]


@pytest.mark.usefixtures("drawing")
def test_dependency_sets_become_a_picture(tmp_path: Path) -> None:
    """A row per set, and its dots at its layers' places."""
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 2, 1))
    figure = engine.ChannelDependency(net, torch.zeros(1, 1, 4, 4)).plot(tmp_path / "sets.svg")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["Set 1: 4 channels", "Set 2: 3 channels"]
    assert b"<svg" in (tmp_path / "sets.svg").read_bytes()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sensitivity_figure(ROWS, [0.1], 0.9, "pie"), "heatmap, curves"),
        (lambda: sensitivity_figure({}, [0.1], 0.9, "curves"), "no rows"),
        (lambda: dependency_figure([], {}), "no dependency sets"),
    ],
)
def test_nothing_to_draw(call: Any, message: str) -> None:
    """A clear error, with or without matplotlib."""
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.usefixtures("drawing")
def test_an_unknown_format(tmp_path: Path) -> None:
    """It names the file."""
    with pytest.raises(InputError, match="table.xyz"):
        engine.SensitivityTable(ROWS, [0.1, 0.5], 0.9).plot(tmp_path / "table.xyz")
