"""Tables of positions in buffers: one call, and a fit with compactions during training and at its end."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import ChannelPruning, ModelCompaction, load_compacted, prune
from tests.engine.exactness import randomised, relative_error, run
from tests.engine.removal.test_tables import Classifier


def _words(*shape: int) -> Tensor:
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(3))


class Words(LightningModule):
    """The tutorial's transformer, trained on random words."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()
        self.example_input_array = _words(2, 7)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits of each word."""
        return self.net(words)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        """Return random words."""
        return DataLoader(TensorDataset(_words(32, 7), torch.randint(3, (32, 7))), 8)


class Outputs(Callback):
    """Keeps the outputs of the masked model at the end of training, before it is compacted."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep them, and whether the table was masked."""
        self.outputs = run(pl_module.net, _words(3, 9))
        pl_module.train()
        self.closed = int((pl_module.net.positions.pe == 0).all(1).sum())


def test_one_call_narrows_the_stream() -> None:
    """And so it does with data."""
    model = randomised(Classifier())
    for data in (None, [_words(32, 7)]):
        small = prune(model, _words(2, 7), 0.5, target="channels", data=data)
        assert small.positions.pe.shape[-1] == small.head.in_features < 16
        assert small.certificate.verified


@pytest.mark.parametrize("when", [None, 2])
def test_a_fit_narrows_the_stream(tmp_path: Path, when: int | None) -> None:
    """The small model computes what the masked one did, and its checkpoint and its exported program are as narrow."""
    torch.manual_seed(0)
    module, outputs = Words(), Outputs()
    callbacks = [ChannelPruning(amount=0.5, start=1, end=2), outputs, ModelCompaction(on_failure="raise", when=when)]
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            max_epochs=3,
            accelerator="cpu",
            precision="64-true",
            default_root_dir=tmp_path,
            callbacks=callbacks,
            **options,
        ).fit(module)
    small = module.net.double()
    assert small.positions.pe.shape == (1, 40, 8)
    assert outputs.closed == (0 if when else 8)
    assert relative_error(outputs.outputs, run(small, _words(3, 9))) <= 1e-9
    words = _words(2, 7)
    exported = torch.export.export(small, (words,)).module()
    assert torch.equal(exported(words), small(words))
    [path] = tmp_path.rglob("compacted.ckpt")
    again = load_compacted(path, Words).double()
    assert relative_error(run(small, words), run(again.net, words)) <= 1e-6  # it was built in float32
