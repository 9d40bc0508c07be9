"""What the short examples share: options, a quiet fit, and a few lines of results."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

import engine
from image_data import Data
from measuring import quieten

Results = dict[str, Any]


def parser(doc: str | None, epochs: int) -> argparse.ArgumentParser:
    """Options of a short example; its docstring is the help."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--epochs", type=int, default=epochs, help="epochs of each fit (default %(default)s)")
    add("--limit", type=int, metavar="N", help="use only the first N training and N test samples")
    add("--log-dir", type=Path, default=Path("runs"), help="folder of logs and checkpoints (default %(default)s)")
    add("--accelerator", default="cpu", help="as in Lightning (default %(default)s: these are small)")
    return result


def fit(
    args: argparse.Namespace, model: pl.LightningModule, data: Data, callbacks: Sequence[Callback] = (), **options: Any
) -> pl.Trainer:
    """Fit on data in memory, logging to TensorBoard under ``--log-dir``; options go to the Trainer."""
    defaults: dict[str, Any] = {
        "max_epochs": args.epochs,
        "accelerator": args.accelerator,
        "devices": 1,
        "logger": TensorBoardLogger(args.log_dir, name=type(model).__name__.lower()),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 10,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})
    validates = type(model).validation_step is not pl.LightningModule.validation_step
    test = DataLoader(data.test, 256) if validates else None
    trainer.fit(model, DataLoader(data.train, 32, shuffle=True, drop_last=True), test)
    return trainer


def sizes(net: nn.Module, example: Any) -> tuple[int, int]:
    """Multiply-accumulates per sample, and parameters."""
    macs, params, _ = engine.count_flops_params(net, example, verbose=False)
    return int(macs), int(params)


def main(doc: str | None, run: Callable[[argparse.Namespace], Results], epochs: int) -> None:
    """Run an example from the command line on one thread, and print what it returns."""
    args = parser(doc, epochs).parse_args()
    quieten()
    torch.set_num_threads(1)
    show(run(args))


def show(results: Mapping[str, Any]) -> None:
    """One line for each result."""
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:<{width}}  {shown(value)}")


def shown(value: Any) -> str:
    """Numbers with separators or few digits, pairs as before and after."""
    if isinstance(value, tuple):
        return " -> ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value)
