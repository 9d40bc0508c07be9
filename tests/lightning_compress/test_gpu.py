"""The same fit on CUDA: everything stays on the device, and the results are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

import engine
from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction, load_compacted
from tests.lightning_compress.models import Reference, Wrapped, difference, fit, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Devices(Callback):
    """Notes on which devices masks and parameters are at each step."""

    def __init__(self, pruning: ChannelPruning) -> None:
        self.pruning = pruning
        self.seen: set[str] = set()
        self.masked = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Note."""
        tensors = [mask for own in self.pruning.masks.values() for mask in own.values()]
        self.masked += len(tensors)
        self.seen |= {t.device.type for t in [*tensors, *pl_module.parameters()]}


def run(folder: Path, accelerator: str) -> tuple[Wrapped, Reference, Devices, ModelCompaction]:
    """Fit, prune and compact on one device."""
    module, reference, compaction = seeded(Wrapped), Reference(), ModelCompaction(on_failure="raise")
    pruning = ChannelPruning(amount=0.5)
    devices = Devices(pruning)
    callbacks = [reference, MaskConflictRepair(), pruning, devices, ComplexityMonitor(), compaction]
    fit(module, folder, *callbacks, accelerator=accelerator, precision="64-true")
    return module, reference, devices, compaction


def test_fit_on_cuda_is_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, compaction and the small modules are on the device; in float64 weights and outputs are the CPU's to
    1e-9.
    """
    compacted_on: list[set[str]] = []
    compacting = engine.ModelSpeedup.compacting

    def noted(self: engine.ModelSpeedup, *rest: Any, **options: Any) -> Any:
        compacted_on.append({p.device.type for p in self._model.parameters()})
        return compacting(self, *rest, **options)

    monkeypatch.setattr(engine.ModelSpeedup, "compacting", noted)
    small, reference, devices, compaction = run(tmp_path / "cuda", "cuda")
    on_cpu, *_ = run(tmp_path / "cpu", "cpu")
    assert devices.seen == {"cuda"} and devices.masked > 0
    assert compacted_on == [{"cuda"}, {"cpu"}]
    assert compaction.certificate is not None and compaction.certificate.verified
    assert small.net.wide.weight.shape == on_cpu.net.wide.weight.shape == (8, 4, 3, 3)
    assert reference.error(small) <= 1e-9
    assert difference(on_cpu, small) <= 1e-9
    for one, other in zip(small.state_dict().values(), on_cpu.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_checkpoint_loads_on_either_device(tmp_path: Path) -> None:
    """A checkpoint written on a CUDA machine loads to the CPU and to the device, with the same outputs within
    rounding.
    """
    module, compaction = seeded(Wrapped), ModelCompaction(on_failure="raise")
    fit(module, tmp_path, ChannelPruning(amount=0.5), compaction, accelerator="cuda")
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped, map_location="cpu"), module.cpu()) == 0.0
    loaded = load_compacted(compaction.checkpoint_path, Wrapped, map_location="cuda")
    assert loaded.device.type == "cuda"
    assert difference(module.cuda(), loaded) <= 1e-6


def test_resume_on_cuda_keeps_masks(tmp_path: Path) -> None:
    """Masks that come from a checkpoint are on the device from the first step on."""
    first = fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5, end=0), accelerator="cuda", max_epochs=1)
    first.save_checkpoint(tmp_path / "last.ckpt")
    resumed = ChannelPruning(amount=0.5, end=0)
    devices = Devices(resumed)
    module = seeded(Wrapped)
    Trainer(
        accelerator="cuda", devices=1, max_epochs=2, callbacks=[resumed, devices], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    ).fit(module, ckpt_path=str(tmp_path / "last.ckpt"))  # fmt: skip
    assert devices.seen == {"cuda"} and devices.masked > 0
    assert int((module.net.wide.bias == 0).sum()) == 8
