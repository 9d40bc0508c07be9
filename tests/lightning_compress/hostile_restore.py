"""Restore files that run code: ``python -m tests.lightning_compress.hostile_restore FOLDER``.

With ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`` any version of Lightning unpickles freely, as those before 2.6 do.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine.errors import CheckpointError
from lightning_compress import Compactable, ModelCompaction
from tests.engine.files.hostile import archive, records


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


class Plain(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers."""
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The sum of squares."""
        return self(batch[0]).square().sum()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Run it."""
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return DataLoader(TensorDataset(torch.ones(2, 3)), 2)

    test_dataloader = train_dataloader


class Mixed(Compactable, Plain):
    """With the mixin, and hooks of its own that do not hand on."""

    def setup(self, stage: str) -> None:
        """Nothing."""


def attempts(folder: Path) -> dict[str, Callable[[str], Any]]:
    """The ways of restoring a file."""
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    options |= {"default_root_dir": folder, "enable_model_summary": False, "max_epochs": 1}

    def trainer() -> Trainer:
        return Trainer(callbacks=[ModelCompaction(save=False)], **options)

    return {
        "test": lambda path: trainer().test(Plain(), ckpt_path=path),
        "fit": lambda path: trainer().fit(Plain(), ckpt_path=path),
        "mixin": lambda path: Trainer(**options).test(Mixed(), ckpt_path=path),
        "load_from_checkpoint": lambda path: Mixed.load_from_checkpoint(path),
    }


def files(ran: Path) -> dict[str, bytes]:
    """Files that make a folder: as torch writes them, and behind the records that a first reader looks at."""
    content = {"state_dict": Plain().state_dict(), "pytorch-lightning_version": "2.4.0", "loops": {}}
    evil, good, old = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({**content, "hyper_parameters": {"a": Code(ran)}}, evil)
    torch.save(content, good)
    torch.save({**content, "hyper_parameters": {"a": Code(ran)}}, old, _use_new_zipfile_serialization=False)
    inside = records(good.getvalue())
    script = {f"{next(iter(inside)).partition('/')[0]}/constants.pkl": pickle.dumps(Code(ran), 2)}
    return {
        "pickle": evil.getvalue(),
        "front": archive(inside, front=old.getvalue()),
        "script": archive({**inside, **script}),
    }


def main(folder: Path) -> None:
    """Try each; print what happened."""
    for name, attempt in attempts(folder).items():
        ran, path = folder / f"ran-{name}", folder / f"{name}.ckpt"
        for kind, data in files(ran).items():
            path.write_bytes(data)
            try:
                attempt(str(path))
            except CheckpointError as error:
                print(name, kind, "ran" if ran.exists() else "refused", "add_safe_globals" in str(error))
            else:
                print(name, kind, "ran" if ran.exists() else "loaded")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
