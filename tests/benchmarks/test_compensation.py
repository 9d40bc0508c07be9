"""The survey of compensation: one small model, and what its page makes of the rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from benchmarks import compensation
from tests.engine.exactness import randomised

ROW: dict[str, Any] = {
    "model": "torchvision:net",
    "layers": [7, 1],
    "inner": [0.9, 0.6],
    "outer": [0.5, 0.01],
    "error": 1e-15,
    "tolerance": 1e-9,
    "predicted": True,
    "seconds": 2.0,
    "skipped": ["its weight is read 2 times"],
}


def test_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both errors fall on inputs that were not fitted, and compaction changes nothing."""
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 6, 3), nn.ReLU(), *pooled).double()
    monkeypatch.setattr(compensation, "build", lambda name: (model.eval(), (3, 8, 8)))
    row = compensation.check("net")
    assert row["layers"][0] >= 1 and not compensation.objections(row) and row["inner"][1] < row["inner"][0]


def test_the_mean_of_a_norm_is_part_of_what_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without a bias is compared behind its norm, where the shift counts that was fitted with its weight."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(n, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU()) for n in (3, 12, 12)]
    model = randomised(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)).eval())
    monkeypatch.setattr(compensation, "build", lambda name: (model, (3, 10, 10)))
    graph = engine.trace(model, torch.zeros(2, 3, 10, 10, dtype=torch.float64))
    ends = [graph.nodes[value.producer].op for value in compensation.compared(graph, ("1.0", "2.0", "5"))]
    assert ends == ["batch_norm", "batch_norm", "linear"]
    row = compensation.check("net")
    assert row["inner"][1] < row["inner"][0] and not compensation.objections(row)


def test_objections() -> None:
    """Each of the claims of the page can be missed, and is said."""
    assert not compensation.objections(ROW)
    wrong = ROW | {"inner": [0.5, 0.6], "outer": [0.5, 0.51], "error": 1e-3, "predicted": False}
    assert len(compensation.objections(wrong)) == 4
    assert compensation.objections({"model": "net", "failed": "ended with -9"}) == ["failed: ended with -9"]


def test_the_page() -> None:
    """Counts are of the rows."""
    text = " ".join(compensation.page([ROW, ROW | {"outer": [0.5, 0.6]}, {"model": "x", "refused": "no"}]).split())
    assert "falls in 2 of 3 models" in text and "rises by more than 1 % in 1." in text and "2 of 3 compute" in text
    assert "| torchvision:net | 7 (1) | 0.9 → 0.6 | 0.5 → 0.01 | 1e-15 | 2.0 | |" in text
    assert "- its weight is read 2 times" in text and "Not measured" not in text


def test_finished_rows_of_any_state_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest row of each model counts, and the page says how many are missing."""
    monkeypatch.setattr(compensation, "RESULTS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(compensation, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(compensation, "names", lambda: ["torchvision:net", "timm:one", "timm:two"])
    monkeypatch.setattr(compensation, "check", None)
    rows = [
        ROW | {"state": "old", "inner": [0.5, 0.6]},
        ROW | {"state": "new"},
        ROW | {"model": "timm:one", "state": "old"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["compensation.py", "--finished"])
    assert compensation.main() == 0
    text = (tmp_path / "page.md").read_text()
    assert "falls in 2 of 2 models" in " ".join(text.split()) and text.count("0.9 → 0.6") == 2
    assert "**Not measured yet: 1 models.**" in text and "of 2 states of the code" in text
