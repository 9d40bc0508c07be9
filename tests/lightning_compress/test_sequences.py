"""Recurrent networks through the callbacks: masked while they train, compacted, loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from tests.lightning_compress.models import Reference, fit

WORDS, CLASSES = 13, 3


class Sequences(LightningModule):
    """Training on random sentences."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, whose averages revive zeros."""
        return torch.optim.Adam(self.parameters(), 0.01, weight_decay=0.01)

    def train_dataloader(self) -> DataLoader:
        """Sentences of six words, with a label each."""
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(WORDS, (24, 6), generator=generator)
        return DataLoader(TensorDataset(words, torch.randint(CLASSES, (24,), generator=generator)), batch_size=8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of the words, or of the label."""
        words, label = batch
        scores = self(words)
        if scores.ndim == 3:
            return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        return F.cross_entropy(scores, label)


class LanguageModel(Sequences):
    """Embedding, two LSTM layers with dropout, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(12, WORDS)
        self.layer = nn.LSTM(8, 12, 2, dropout=0.2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the next word at each place."""
        found: Tensor = self.head(self.layer(self.table(words))[0])
        return found


class Classifier(Sequences):
    """A bidirectional GRU; the last states of both directions are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(12, CLASSES)
        self.layer = nn.GRU(8, 6, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the sentence."""
        states = self.layer(self.table(words))[1]
        found: Tensor = self.head(torch.cat([states[-2], states[-1]], 1))
        return found


def same(one: LightningModule, other: LightningModule, tolerance: float = 1e-9) -> bool:
    """Whether two modules compute the same at two lengths."""
    for shape in ((2, 6), (5, 9)):
        words = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            left, right = one.eval()(words), other.eval()(words)
        if float((left - right).abs().max() / left.abs().max()) > tolerance:
            return False
    return True


@pytest.mark.parametrize("criterion", ["l1", "l2", "taylor", "random"])
@pytest.mark.parametrize("cls", [LanguageModel, Classifier])
def test_pruned_while_training(tmp_path: Path, cls: type[Sequences], criterion: str) -> None:
    """Units of all layers and directions, and columns of the table: half of each, to 1e-9 in float64."""
    torch.manual_seed(0)
    module, reference, compaction = cls(), Reference(), ModelCompaction(on_failure="raise")
    callbacks = [ChannelPruning(criterion, amount=0.5), MaskConflictRepair(policy="union"), compaction]
    words = torch.zeros(2, 6, dtype=torch.long)
    for callback in callbacks:
        callback.example_input = words
    fit(module, tmp_path, reference, *callbacks, precision="64-true")
    assert module.layer.hidden_size == (6 if cls is LanguageModel else 3) and module.layer.input_size == 4
    assert compaction.certificate is not None and compaction.certificate.verified
    masked = cls().double()
    masked.load_state_dict(reference.weights)
    assert same(masked, module)
    loaded = load_compacted(compaction.checkpoint_path, cls)
    assert loaded.layer.weight_hh_l0.shape == module.layer.weight_hh_l0.shape and same(module, loaded.double(), 1e-6)
