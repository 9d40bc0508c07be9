"""The tables of accuracy after pruning, in their smallest form."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import accuracy
from benchmarks.accuracy import END, START, Images, curves, figure, page, rows, write
from benchmarks.cifar_resnets import CifarResNet, pretrained


def archive(folder: Path) -> Path:
    """Random images with random labels."""
    generator = np.random.default_rng(0)
    sizes = {"train": 64, "test": 40}
    arrays: dict[str, Any] = {f"x_{k}": generator.integers(0, 256, (n, 32, 32, 3), np.uint8) for k, n in sizes.items()}
    arrays |= {f"y_{k}": generator.integers(0, 10, n) for k, n in sizes.items()}
    np.savez(folder / "cifar10.npz", **arrays)
    return folder / "cifar10.npz"


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, each within its budget; none is measured twice, and the page holds them in place of older ones."""
    torch.manual_seed(0)
    images, net = Images.load(archive(tmp_path), 32), CifarResNet(1, 8).eval()
    rivals = ["magnitude"] if importlib.util.find_spec("torch_pruning") else []
    arguments: Any = ({"tiny": net}, images, [0.3], 1, 32, ["l2", "reconstruction"], tmp_path / "rows.jsonl", rivals)
    table = rows(*arguments)
    keys = {(row["by"], row["criterion"], row["recovery"]) for row in table}
    assert {key for key in keys if key[0] == "lightning-compress"} == {
        ("lightning-compress", criterion, recovery)
        for criterion in ("l2", "reconstruction")
        for recovery in accuracy.RECOVERIES
    }
    assert any(key[0].startswith("Torch-Pruning") for key in keys) == bool(rivals)
    assert all(0 <= row["accuracy"] <= 100 and 0.3 < row["left"] <= 0.7 for row in table)
    monkeypatch.setattr(accuracy, "ours", None)
    monkeypatch.setattr(accuracy, "peers", None)
    assert rows(*arguments) == table
    results = tmp_path / "results.md"
    results.write_text(f"# Results\n\n{START}\nold\n{END}\n\nmore\n")
    for _ in range(2):
        write(page(table, {"tiny": 10.0}, 32, 32), results)
        text = results.read_text()
        assert text.count(START) == text.count(END) == 1 and "old" not in text and text.endswith("more\n")
    assert "| lightning-compress | reconstruction | least squares |" in text and "| 30% |" in text
    figure(table, "tiny", 10.0, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert drawn.startswith("<?xml") and "tiny on CIFAR-10" in drawn


def test_curves_take_means_of_ours_and_the_best_of_the_peer() -> None:
    """So that the picture can only be unfair to us."""

    def row(by: str, criterion: str, recovery: str, accuracy: float, left: float = 0.7) -> dict[str, Any]:
        about = {"network": "net", "amount": 0.3, "by": by, "criterion": criterion, "recovery": recovery}
        return {**about, "accuracy": accuracy, "left": left}

    table = [
        row("lightning-compress", "reconstruction", "least squares", 80.0, 0.7),
        row("lightning-compress", "reconstruction", "least squares", 84.0, 0.6),
        row("Torch-Pruning", "taylor", "norms", 50.0),
        row("Torch-Pruning, stream kept", "magnitude", "none", 60.0),
    ]
    ours, peer = curves(table, "net").values()
    assert ours == [(pytest.approx(35.0), 82.0)] and peer == [(pytest.approx(30.0), 60.0)]


def test_published_names(tmp_path: Path) -> None:
    """Weights under the names that are published load, and give the numbers of parameters that are known."""
    net = CifarResNet(3)
    assert sum(p.numel() for p in net.parameters()) == 269_722
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, tmp_path / "resnet20-1.th")
    loaded = pretrained("resnet20", tmp_path)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), net.eval()(x))
