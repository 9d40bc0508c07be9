"""Files and lines as readers know them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.program.places import shown_place


def test_packages_and_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package by its name, also where its folder is inside of the current one; a file of this one by its own."""
    inner = tmp_path / ".venv" / "site-packages"
    monkeypatch.setattr(sys, "path", ["", str(inner)])
    monkeypatch.chdir(tmp_path)
    assert shown_place(f"{inner}/package/nn/tasks.py:162") == "package/nn/tasks.py:162"
    assert shown_place(f"{tmp_path}/train.py:3") == "train.py:3"
    assert shown_place("/elsewhere/train.py:3") == "/elsewhere/train.py:3"
    assert shown_place(f"{tmp_path}-other/train.py:3") == f"{tmp_path}-other/train.py:3"
    assert shown_place("<stdin>:1") == "<stdin>:1"


class Literal(nn.Module):
    """Writes a size down, and has code that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.fixed, self.last = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        """Return scores."""
        x = self.fixed(self.free(x).relu())
        if scale is not None:
            x = x * scale
        return self.last(x.view(-1, 2, 4).sin().flatten(1))


def test_no_reason_and_no_note_holds_an_absolute_path() -> None:
    """Of frozen channels, groups, plans and certificates."""
    net, x = Literal().double().eval(), torch.rand(3, 4, dtype=torch.float64)
    mask = torch.ones(6, 4)
    mask[:3] = 0
    speedup = engine.ModelSpeedup(net, x, {"free": {"weight": mask, "bias": mask[:, 0]}})
    speedup.speedup_model()
    reasons = "\n".join(map(str, engine.not_safe_to_prune(net, x).reasons.values()))
    text = "\n".join(map(str, (reasons, speedup.plan, speedup.certificate, *engine.trace(net, x).nodes)))
    assert "tests/engine/program/test_places.py:" in reasons and net.free.out_features < 6
    assert str(Path(__file__).parents[3]) not in text
