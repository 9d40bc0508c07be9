"""The U-Net, on a few canvases."""

from __future__ import annotations

from pathlib import Path

import torch
import unet_segmentation
from torch.utils.data import TensorDataset

from tests.examples import small


def test_skips_and_transposed_convolutions_shrink_together(tmp_path: Path) -> None:
    """40 % of the channels leave less than half of the work; exact; the page is written."""
    found = small.run(unet_segmentation, tmp_path)
    assert found["MACs"][1] < 0.45 * found["MACs"][0] and found["parameters"][1] < 0.45 * found["parameters"][0]
    assert found["error of the compaction"] <= 1e-9 and found["error of the reloaded"] == 0
    assert "up1" in found["report"].read_text()


def test_a_canvas_holds_two_digits_and_their_labels() -> None:
    """Labels are where the ink is: 0 for background, else the digit plus 1, left and right apart."""
    images = torch.full((2, 1, 16, 16), -0.5)
    images[:, :, 4:8, 4:8] = 0.5
    canvas, labels = unet_segmentation.canvases(TensorDataset(images, torch.tensor([3, 7])), seed=0).tensors
    assert canvas.shape == (2, 1, 16, 32) and labels.shape == (2, 16, 32)
    assert labels[0, 4:8, 4:8].unique().tolist() == [4] and labels[0].count_nonzero() == 32
    assert set(labels[:, :, 16:].unique().tolist()) <= {0, 4, 8}


def test_mean_iou_is_over_digits_only() -> None:
    """Half of one digit found, the other not at all; the background does not count."""
    wanted = torch.tensor([[0, 1, 1, 2]])
    assert unet_segmentation.mean_iou(torch.tensor([[0, 1, 0, 0]]), wanted) == 0.25
