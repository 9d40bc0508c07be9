"""What a training step passes to the model is the example where no part of the batch is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_compress import ChannelPruning, Compensation, MaskConflictRepair, ModelCompaction
from lightning_compress.trainer import target
from lightning_compress.trainer.model_arguments import model_arguments
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Root, Wrapped, data, fit, seeded


def _mappings() -> DataLoader:
    entries = [{"picture": x * 255, "label": y, "index": n} for n, (x, y) in enumerate(data().dataset)]
    return DataLoader(entries, batch_size=8)


class Keys(Wrapped):
    """Batches are mappings whose keys are not arguments, and pictures are scaled before the model sees them."""

    steps = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        self.steps += 1
        loss = F.cross_entropy(self.logits(batch["picture"] / 255), batch["label"])
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        """Mappings."""
        return _mappings()


class Nested(Root):
    """The model is the LightningModule, which takes a mapping that the step makes."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self(x=batch["picture"] / 255), batch["label"])

    def train_dataloader(self) -> DataLoader:
        """Mappings."""
        return _mappings()


class Fails(Keys):
    """The step fails before it calls the model."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Ask for a key that is not there."""
        return self.net(batch["missing"])


@pytest.mark.parametrize("kind", [Keys, Nested])
def test_no_example_is_needed(kind: type[Any], tmp_path: Path) -> None:
    """Neither for masks, nor for the compaction, nor for the batches that weights are fitted on."""
    module, compaction = seeded(kind), ModelCompaction(on_failure="raise")
    callbacks = [ChannelPruning(amount=0.5), MaskConflictRepair(), Compensation(samples=8), compaction]
    fit(module, tmp_path, *callbacks)
    assert compaction.plan is not None and compaction.plan.slices


def test_without_the_step_there_is_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the batch say nothing."""
    monkeypatch.setattr(target, "first_model_arguments", lambda *arguments: [])
    with pytest.raises(MisconfigurationException, match="rejects the example input from the first training batch"):
        fit(seeded(Keys), tmp_path, ChannelPruning(amount=0.5), ModelCompaction())


def test_a_step_that_fails_is_no_example(tmp_path: Path) -> None:
    """What is said is what was said before."""
    with pytest.raises(MisconfigurationException, match="rejects the example input from the first training batch"):
        fit(seeded(Fails), tmp_path, ChannelPruning(amount=0.5), ModelCompaction())


def test_a_look_leaves_no_trace(tmp_path: Path) -> None:
    """Neither on the module nor on the random state; a module outside of a step passes nothing."""
    module = seeded(Keys)
    fit(module, tmp_path)
    batch = next(iter(_mappings()))
    steps, state, modes = module.steps, torch.get_rng_state(), [m.training for m in module.modules()]
    arguments = model_arguments(module, module.net, (batch, 0))
    assert torch.equal(arguments, batch["picture"] / 255) and not arguments.requires_grad
    assert module.steps == steps and torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in module.modules()] == modes and not module.net._forward_pre_hooks
    assert model_arguments(module, nn.Linear(1, 1), (batch, 0)) is None
