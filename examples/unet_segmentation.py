"""A U-Net for segmentation: skip connections, transposed convolutions, a data set of one's own.

What this example teaches:

1. Concatenated skips and up-sampling need nothing special: each decoder follows its encoder's channels.
2. The report: ``CompressionReport`` writes one HTML page with what became of each layer.
3. Any loader will do; the callbacks take the first batch as the example input where the module has none.

Real digits (of scikit-learn) lie on a canvas; each pixel belongs to one of ten digits or to the background.

    make example NAME=unet_segmentation
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from fitting import Results, fit, main, sizes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from image_data import Data, load
from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    CompressionReport,
    MaskConflictRepair,
    ModelCompaction,
    load_compacted,
)
from measuring import evaluating, relative_difference


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Two levels down and up again (Ronneberger et al., 2015)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.down1, self.down2 = double(1, width), double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2, self.up1 = (nn.ConvTranspose2d(n, n // 2, 2, 2) for n in (4 * width, 2 * width))
        self.join2, self.join1 = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, H, W) -> (N, classes, H, W); H and W are divisible by 4."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.bottom(F.max_pool2d(two, 2))
        x = self.join2(torch.cat([two, self.up2(x)], 1))
        x = self.join1(torch.cat([one, self.up1(x)], 1))
        return self.head(x)


class Segmenter(pl.LightningModule):
    """An ordinary LightningModule; nothing in it knows of pruning."""

    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet(width, classes=11)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of each pixel."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Mean intersection over union of the digits."""
        self.log("val/iou", mean_iou(self.net(batch[0]).argmax(1), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


def mean_iou(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Intersection over union, averaged over the digits that occur; the background does not count."""
    scores = [
        ((predicted == digit) & (wanted == digit)).sum() / ((predicted == digit) | (wanted == digit)).sum()
        for digit in wanted.unique()
        if digit
    ]
    return torch.stack(scores).mean()


def canvases(digits: TensorDataset, seed: int) -> TensorDataset:
    """Two digits on a canvas of 16 x 32 pixels with noise; labels are 0 for background, else the digit plus 1."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits.tensors
    other = torch.randperm(len(labels), generator=generator)
    canvas = torch.cat([images, images[other]], 3) + 0.5
    ink = (canvas > 0.35)[:, 0]
    names = torch.stack([labels, labels[other]], 1).repeat_interleave(16, 1)[:, None] + 1
    noisy = canvas + 0.1 * torch.randn(canvas.shape, generator=generator)
    return TensorDataset(noisy, torch.where(ink, names, 0))


def score(net: nn.Module, test: TensorDataset) -> float:
    """Mean intersection over union on the test set."""
    with evaluating(net):
        return float(mean_iou(net(test.tensors[0]).argmax(1), test.tensors[1]))


def run(args: argparse.Namespace) -> Results:
    """Train and prune, compact, report, reload."""
    pl.seed_everything(0, verbose=False)
    data = Data(*(canvases(part, seed) for seed, part in enumerate(load("digits", args.log_dir, limit=args.limit))))
    model = Segmenter()
    image = data.test.tensors[0][:1]
    before = sizes(model.net, image)
    compaction, report = ModelCompaction(on_failure="raise"), CompressionReport(terminal="none", figures=False)
    # The width of the stem is part of what the skip hands over; it may go like any other.
    callbacks = [ChannelPruning("l2", amount=0.4), MaskConflictRepair(), ComplexityMonitor(), compaction, report]
    fit(args, model, data, callbacks)
    after = sizes(model.net, image)
    again = load_compacted(compaction.checkpoint_path, Segmenter)
    return {
        "MACs": (before[0], after[0]),
        "parameters": (before[1], after[1]),
        "mean IoU of the digits": score(again.net, data.test),
        "error of the compaction": compaction.certificate.max_error,
        "error of the reloaded": relative_difference(model.net, again.net, data.test.tensors[0][:64]),
        "report": report.path,
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=8)
