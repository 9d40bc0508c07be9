"""Pictures, and what happens without the package that draws them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import InputError
from engine.plots import accuracy_figure, channels_figure, dependency_figure, lanes, sensitivity_figure
from tests.engine.nets import image, residual_net

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
def test_fifty_curves_can_be_told_apart() -> None:
    """The ten layers that change the metric most have colours and names, the others are grey; all are drawn."""
    rows = {f"layer{n}": {0.5: 0.9 - 0.01 * n} for n in range(50)}
    axes = sensitivity_figure(rows, [0.5], 0.9, "curves").axes[0]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == [*(f"layer{n}" for n in range(40, 50)), "40 others, which change it less"]
    assert len(axes.lines) == 52 and len({line.get_color() for line in axes.lines}) == 11


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
    """A row per layer with its channels, and a line through the layers of each set."""
    net = residual_net()
    figure = engine.ChannelDependency(net, image()).plot(tmp_path / "sets.svg")
    axes = figure.axes[0]
    dependency = engine.ChannelDependency(net, image())
    names = [t.get_text() for t in axes.get_yticklabels()]
    assert names == [name for name in dependency.channels if name in dependency.dependency]
    drawn = [{names[int(y)] for y in line.get_ydata()} for line in axes.lines]
    assert drawn == dependency.dependency_sets
    right = [t.get_text() for t in axes.child_axes[0].get_yticklabels()]
    assert right == [f"{dependency.channels[name]} channels" for name in names]
    assert b"<svg" in (tmp_path / "sets.svg").read_bytes()


def test_lines_that_pass_the_same_row_are_side_by_side() -> None:
    """A lane is used again only below where it ended; the order of the sets does not matter."""
    assert lanes([["d", "f"], ["a", "e"], ["b", "c"]], "abcdef") == [1, 0, 1]
    assert lanes([["a", "b"], ["b", "c"]], "abc") == [0, 1]


@pytest.mark.usefixtures("drawing")
def test_kept_and_removed_channels_become_bars() -> None:
    """What stays from the left, what goes behind it, and the numbers beside."""
    axes = channels_figure({"conv1": (3, 8), "conv2": (4, 4)}).axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 3), (0, 4), (3, 5), (4, 0)]
    assert [t.get_text() for t in axes.texts] == ["3 of 8", "4 of 4"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["conv1", "conv2"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sensitivity_figure(ROWS, [0.1], 0.9, "pie"), "heatmap, curves"),
        (lambda: sensitivity_figure({}, [0.1], 0.9, "curves"), "no rows"),
        (lambda: dependency_figure([], {}), "no dependency sets"),
        (lambda: channels_figure({}), "no layers"),
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


@pytest.mark.usefixtures("drawing")
def test_accuracy_is_drawn_over_cost() -> None:
    """A dot for each network, with its name, from zero on."""
    axes = accuracy_figure("val_acc", [("dense", 1e9, 0.93), ("compacted", 5e8, 0.92)]).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dense", "compacted"]
    assert axes.get_xlim()[0] == 0 and axes.get_ylabel() == "val_acc"
    with pytest.raises(InputError, match="no points"):
        accuracy_figure("val_acc", [])
