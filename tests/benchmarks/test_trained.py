"""Pruning trained networks of packages: what counts as the same answer, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import trained


def _subject(dense: nn.Module) -> trained.Subject:
    def inputs(count: int, seed: int) -> Tensor:
        return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))

    return trained.Subject(lambda: dense, inputs, None, trained.voices, "cosine")


def test_the_smallest_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that needs no package goes through what all others do; a run that was stopped goes on where it was."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    monkeypatch.setattr(trained, "SUBJECTS", {"small": _subject(dense)})
    monkeypatch.setattr(trained, "COUNT", 32)
    monkeypatch.setattr(trained, "RESULTS", tmp_path / "rows" / "trained.jsonl")
    monkeypatch.setattr(trained, "PAGE", tmp_path / "trained.md")
    monkeypatch.setattr(sys, "argv", ["trained.py", "--samples", "64"])
    measure, once = trained.measure, []

    def interrupted(name: str, amount: float, count: int, samples: int) -> dict[str, Any]:
        if once:
            raise RuntimeError("the power went out")
        once.append(amount)
        return measure(name, amount, count, samples)

    monkeypatch.setattr(trained, "measure", interrupted)
    with pytest.raises(RuntimeError, match="the power went out"):
        trained.main()
    assert not trained.PAGE.exists()
    monkeypatch.setattr(trained, "measure", measure)
    assert trained.main() == 0
    rows = [json.loads(text) for text in trained.RESULTS.read_text().splitlines()]
    assert [row["amount"] for row in rows] == [0.3, 0.5]
    assert all(row["compensated"] > row["magnitude"] and row["error"] < 1e-6 for row in rows)
    text = trained.PAGE.read_text()
    assert "| small | 30% |" in text and "| small | 50% |" in text and "| 64 | cosine |" in text
    trained.RESULTS.write_text(trained.RESULTS.read_text().replace('"state": "', '"state": "older '))
    trained.PAGE.unlink()
    monkeypatch.setattr(trained, "measure", None)
    monkeypatch.setattr(sys, "argv", ["trained.py", "--finished"])
    assert trained.main() == 0 and trained.PAGE.read_text() == text


def test_answers() -> None:
    """Faces by the class of a face, pitches by neighbouring bins."""
    scores = torch.tensor([[0.9, 0.1]] * 9 + [[0.2, 0.8]])
    assert trained.faces(scores, scores) == 1 and trained.faces(scores, scores.flip(1)) < 0.2
    bins = torch.eye(8)
    assert trained.pitches(bins, bins) == 1 and trained.pitches(bins[:3], bins[2:5]) == 1
    assert trained.pitches(bins[:3], bins[3:6]) == 0


def test_inputs() -> None:
    """Tones and speech are the same for the same seed, and bounded."""
    assert torch.equal(trained.tones(3, 1), trained.tones(3, 1)) and trained.tones(3, 1).shape == (3, 1024)
    wave = trained.voice(np.random.default_rng(0), 0.1)
    assert wave.shape == (1600,) and np.abs(wave).max() < 1
