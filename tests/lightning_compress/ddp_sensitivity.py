"""A sensitivity analysis on two CPU processes, from a script and within a fit. Started by test_sensitivity.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

import engine
from engine import SensitivityAnalysis
from lightning_compress import analyze_sensitivity
from tests.lightning_compress.models import seeded, trainer
from tests.lightning_compress.selection.test_sensitivity import OPTIONS, Measured


class AtTheEnd(Callback):
    """Analyses once the processes are running, with the Trainer that started them."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All ranks have the same weights here."""
        self.table = analyze_sensitivity(trainer, pl_module, **OPTIONS)


class Late(SensitivityAnalysis):
    """Begins when another rank has had the time to write its first results."""

    def __init__(self, *args: Any, **options: Any) -> None:
        time.sleep(1)
        super().__init__(*args, **options)


def main(folder: Path) -> None:
    """Analyse and write, each rank its own."""
    torch.set_num_threads(1)
    inside = AtTheEnd()
    run = trainer(folder, inside, strategy="ddp", devices=2, max_epochs=1, limit_train_batches=1, limit_val_batches=1.0)
    module = seeded(Measured)
    if run.global_rank:
        engine.SensitivityAnalysis = Late  # type: ignore[misc]
        torch.nn.init.zeros_(module.net.fc.weight)  # rank 0's weights are the ones that count
    table = analyze_sensitivity(run, module, results_path=folder / "results.jsonl", **OPTIONS)
    table.export(folder / f"before{run.global_rank}.csv")
    run.fit(seeded(Measured))
    inside.table.export(folder / f"after{run.global_rank}.csv")
    torch.save(run.lightning_module.state_dict(), folder / f"weights{run.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
