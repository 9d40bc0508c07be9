"""Norms that lost channels, at the end of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_compress import (
    ChannelPruning,
    CompressionReport,
    MaskConflictRepair,
    ModelCompaction,
    load_compacted,
)
from lightning_compress.report.content import gains, sections
from lightning_compress.trainer.packages import MisconfigurationException
from tests.engine.language import Language, RootMeanSquare, sentence


class Decoder(LightningModule):
    """A decoder of one layer, with a layer norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Language(width=8, neurons=4, heads=2, depth=1)
        self.net.norm = nn.LayerNorm(8)  # type: ignore[assignment]
        self.example_input_array = sentence()

    def forward(self, words: Tensor) -> Tensor:
        """Return scores."""
        return self.net(words)

    def training_step(self, words: Tensor) -> Tensor:
        """Cross-entropy of the next word."""
        return F.cross_entropy(self(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    def validation_step(self, words: Tensor) -> None:
        """Log the loss."""
        self.log("val_loss", self.training_step(words))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-3)


class Norms(Callback):
    """Notes which norms have another class at the start of each epoch's second half."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note them."""
        self.seen.append(exchanged(pl_module))


def exchanged(module: nn.Module) -> list[str]:
    """Names of the norms whose class is not their own."""
    norms = ((n, m) for n, m in module.named_modules() if isinstance(m, (nn.LayerNorm, RootMeanSquare)))
    return [name for name, norm in norms if "_engine_made_by" in vars(type(norm))]


def fitted(folder: Path, *more: Callback, **arguments: Any) -> tuple[Decoder, ModelCompaction, Norms]:
    """Two short epochs."""
    torch.manual_seed(0)
    module, norms = Decoder(), Norms()
    compaction = ModelCompaction(on_failure="raise", confidence=2, **arguments)
    callbacks = [ChannelPruning(amount=0.5, exclude="*head"), MaskConflictRepair(), norms, compaction, *more]
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, default_root_dir=folder, **options)
    loader = DataLoader(sentence(8), batch_size=4)
    trainer.fit(module, loader, loader)
    return module, compaction, norms


@pytest.mark.parametrize("exact", [True, False])
def test_a_report_has_no_metric_of_a_network_that_was_not_validated(tmp_path: Path, exact: bool) -> None:
    """With ordinary norms the compacted network is another one than what the last epoch validated."""
    callback = CompressionReport(terminal="none", figures=False, latency_runs=0, dirpath=tmp_path)
    fitted(tmp_path, callback, plain_norms=not exact)
    report = callback.report
    assert report is not None and report.certificate is not None and report.certificate.exact is exact
    assert report.stages[-1].name == "compacted" and ("val_loss" in report.stages[-1].metrics) is exact
    assert ("compression/val_loss" in gains(report)) is exact
    assert ("validate it" in sections(report)[0].lead) is not exact


def test_at_the_end_rms_norms_are_ordinary_ones(tmp_path: Path) -> None:
    """While training goes on they keep their statistics; the checkpoint loads."""
    module, compaction, norms = fitted(tmp_path, when=1, plain_norms="exact")
    assert "net.blocks.0.norm" in norms.seen[-1] and exchanged(module) == ["net.norm"]
    assert compaction.certificate is not None and compaction.certificate.exact
    again = load_compacted(compaction.checkpoint_path, Decoder)
    assert exchanged(again) == ["net.norm"]
    assert torch.equal(again.eval()(sentence()), module.eval()(sentence()))


@pytest.mark.parametrize(
    ("arguments", "left"),
    [({"plain_norms": False}, 3), ({"plain_norms": True}, 0)],
)
def test_other_ways(tmp_path: Path, arguments: dict[str, Any], left: int) -> None:
    """None, or all of them."""
    module, compaction, _ = fitted(tmp_path, **arguments)
    assert len(exchanged(module)) == left and compaction.certificate is not None
    assert compaction.certificate.exact == (left > 0)


def test_other_values_are_refused() -> None:
    """They are listed."""
    with pytest.raises(MisconfigurationException, match="'exact'"):
        ModelCompaction(plain_norms="all")
    with pytest.raises(MisconfigurationException, match="optimizer state"):
        ModelCompaction(plain_norms="exact", save_weights_only=False)
