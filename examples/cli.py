"""Everything from a YAML file: LightningCLI.

What this example teaches:

1. All arguments of the callbacks are plain values, names and patterns, so that ``cli.yaml`` beside this file holds
   them; no line of Python changes from one experiment to the next.
2. Another experiment is another file, or options behind it (``--trainer.max_epochs=20 --data.batch_size=64``).

    make example NAME=cli
    make example NAME=cli ARGS="fit --config examples/cli.yaml --trainer.max_epochs=20"
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader

import lightning_compress  # noqa: F401 - its callbacks are known by their names once it is imported
from digits import Classifier
from image_data import load
from measuring import quieten


class Digits(pl.LightningDataModule):
    """Handwritten digits.

    Args:
        limit: number of training and of test images; None for all.
        batch_size: images per step.
    """

    def __init__(self, limit: int | None = None, batch_size: int = 32) -> None:
        super().__init__()
        self.data = load("digits", Path(), limit=limit)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        """Shuffled."""
        return DataLoader(self.data.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.data.test, 256)


def main() -> LightningCLI:
    """Run LightningCLI with what the command line says, by default with the file beside this one."""
    arguments = None if sys.argv[1:] else ["fit", "--config", str(Path(__file__).with_suffix(".yaml"))]
    options = {"seed_everything_default": 0, "save_config_kwargs": {"overwrite": True}}
    return LightningCLI(Classifier, Digits, args=arguments, **options)


if __name__ == "__main__":
    quieten()
    torch.set_num_threads(1)
    main()
