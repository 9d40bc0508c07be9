"""The benchmark, on a few random images and a net of a few channels."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import cifar10_resnet56 as example
import image_data
from tests.examples.small import one_thread

TINY = example.Protocol(depth=8, width=8, images=None, dense_epochs=1, pruned_epochs=3, batch_size=16, ratios=(2.11,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with parts of a tiny archive."""
    result = tmp_path_factory.mktemp("cifar")
    random = np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", 48), ("test", 20)):
        arrays[f"x_{name}"] = random.integers(0, 255, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{name}"] = random.integers(0, 10, count, dtype=np.uint8)
    np.savez(result / "cifar10.npz", **arrays)
    image_data.split(result, images=30)
    return result / "parts"


def arguments(folder: Path, logs: Path, *more: str) -> argparse.Namespace:
    """The command line, with a tiny protocol."""
    args = example.parser().parse_args(["--data-dir", str(folder), "--log-dir", str(logs), "--seeds", "3", *more])
    args.protocol = TINY
    return args


def test_the_comparison_in_pieces(folder: Path, tmp_path: Path) -> None:
    """Stopped in time again and again it ends as in one go, with 2.11 times fewer MACs and a paired difference."""
    with one_thread():
        for epoch in (1, 2):  # the first epoch of a piece is always run: without time, each piece is one epoch
            with pytest.raises(example.OutOfTime):
                example.run(arguments(folder, tmp_path / "pieces", "--minutes", "0"))
            kept = torch.load(tmp_path / "pieces/seed3/2.11x/latest.ckpt", weights_only=True)
            assert kept["epoch"] + 1 == epoch
        table = example.run(arguments(folder, tmp_path / "pieces"))
    dense, pruned = (json.loads((tmp_path / "pieces/seed3" / f"{n}.json").read_text()) for n in ("dense", "2.11x"))
    assert 2.11 <= dense["macs"] / pruned["macs"] < 2.3
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ResNet-8")]
    assert [row[1] for row in rows] == ["1", f"{dense['macs'] / pruned['macs']:.2f}"]
    assert rows[1][3] == f"{pruned['accuracy']:.2f}"
    assert rows[1][5].rstrip(" |") == f"{pruned['accuracy'] - dense['accuracy']:+.2f}"
    assert (tmp_path / "pieces/results.md").read_text() == table


def test_resnet56_has_the_size_that_the_field_compares() -> None:
    """0.86 M parameters and 126 M multiply-accumulates."""
    macs, params, _ = example.engine.count_flops_params(example.CifarResNet(56, 16), (1, 3, 32, 32), verbose=False)
    assert (round(macs / 1e6), round(params / 1e4)) == (126, 86)


def test_batches_are_windows_of_the_images() -> None:
    """Each image once, shifted by up to four pixels over zeros, half of them mirrored."""
    images = torch.arange(1.0, 9).view(8, 1, 1, 1) * torch.linspace(0.1, 1, 32).expand(8, 3, 32, 32)
    torch.manual_seed(0)
    ((seen, labels),) = example.Batches(images, torch.arange(8), 8)
    assert sorted(labels.tolist()) == list(range(8)) and seen.shape == (8, 3, 32, 32)
    mirrored = 0
    for image, label in zip(seen, labels, strict=True):
        flips = [image, image.flip(2)]
        padded = torch.nn.functional.pad(images[label], (4, 4, 4, 4))
        windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 32, 32)
        found = [any(torch.equal(flip, window) for window in windows) for flip in flips]
        assert sum(found) == 1
        mirrored += found[1]
    assert 0 < mirrored < 8


def test_the_table_has_the_published_figures_for_the_full_network_only() -> None:
    """They are of ResNet-56."""
    assert any("DepGraph" in line and "93.77" in line for line in example.published("2.11x"))
    assert example.published("dense") == []
    assert example.mean_and_deviation([93.0, 94.0], sign="+") == "+93.50 ± 0.71"
