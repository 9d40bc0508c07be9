"""Tables in HTML, which notebooks show."""

from __future__ import annotations

from html import escape

import pytest
import torch
from torch import nn

import engine
from engine import html


def things() -> dict[str, object]:
    """One of each class that notebooks show."""
    net, x = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.rand(1, 1, 2, 2)
    graph, dependency = engine.trace(net, x), engine.ChannelDependency(net, x)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    masks = {"0": {"weight": mask.view(4, 1, 1, 1), "bias": mask}}
    speedup = engine.ModelSpeedup(net, x, masks, confidence=1)
    speedup.speedup_model()
    table = engine.SensitivityTable({"0": {0.5: 0.8}}, [0.5], baseline=0.9)
    return {
        "Plan": speedup.plan,
        "Certificate": speedup.certificate,
        "Graph": graph,
        "ChannelDependency": dependency,
        "SensitivityTable": table,
    }


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("Plan", ("0.weight", "[4, 1, 1, 1]", "[2, 1, 1, 1]")),
        ("Certificate", ("verified", "float64")),
        ("Graph", ("relu", "[1, 4, 2, 2]")),
        ("ChannelDependency", ("<td", ">0<")),
        ("SensitivityTable", ("50%", "0.8", "0.9 with none")),
    ],
)
def test_a_notebook_shows_a_table(kind: str, parts: tuple[str, ...]) -> None:
    """With what its text says."""
    text = things()[kind]._repr_html_()  # type: ignore[attr-defined]
    assert text.count("<table>") == text.count("</table>") == 1
    assert all(part in text for part in parts)


def test_names_are_escaped() -> None:
    """Titles, heads, cells and notes."""
    text = html.table("<b>", ("<i>",), [("<u>",)], ["<s>"])
    assert all(escape(tag) in text and tag not in text.replace("<b>&", "") for tag in ("<i>", "<u>", "<s>"))


def test_an_empty_plan_says_so() -> None:
    """There is nothing to remove."""
    assert "nothing to remove" in engine.Plan()._repr_html_()
