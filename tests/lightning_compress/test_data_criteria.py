"""Criteria that look at gradients squared, or at what the other channels can make up for, in real fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from lightning_compress import ChannelPruning, Compensation, ModelCompaction
from lightning_compress.selection.evidence import squared_changes
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.callbacks.test_compensation import Flat, Shuffled
from tests.lightning_compress.models import Wrapped, fit, seeded
from tests.lightning_compress.small import Classifier


@pytest.mark.parametrize("criterion", ["reconstruction", "fisher"])
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_every_kind_of_group_is_scored(tmp_path: Path, name: str, criterion: str) -> None:
    """Streams, neurons, heads: each loses units, and none is left whole for want of a score."""
    module, compaction = Classifier(name), ModelCompaction(on_failure="raise", confidence=1, steps=False)
    pruning = ChannelPruning(criterion, amount=0.5, schedule="one_shot", samples=8, gather_every=1)
    fit(module, tmp_path, pruning, Compensation(8), compaction, max_epochs=3)
    assert compaction.certificate.verified
    assert sum(p.numel() for p in module.parameters()) < 0.5 * sum(p.numel() for p in Classifier(name).parameters())


def test_the_data_stay_in_order(tmp_path: Path) -> None:
    """Each step sees the batch and the random state that it would see with another criterion."""
    runs = []
    for criterion in ("l2", "reconstruction"):
        module = seeded(Shuffled)
        fit(module, tmp_path, ChannelPruning(criterion, amount=0.5, end=2, samples=16))
        runs.append(module.batches)
    assert len(runs[0]) == len(runs[1]) and all(map(torch.equal, *runs))


def test_squared_changes_by_hand() -> None:
    """Of the weight, the bias and the norm of each channel, and not of what reads it."""
    module = seeded(Wrapped)
    images = torch.randn(4, 3, 8, 8)
    groups = {group.name: group for group in engine.dependency_groups(module.net, images)}
    module.net(images).square().sum().backward()
    net: Any = module.net
    expected = sum(
        (p.detach() * p.grad).flatten(1).square().sum(1) if p.ndim > 1 else (p.detach() * p.grad).square()
        for p in (net.wide.weight, net.wide.bias, net.wide_norm.weight, net.wide_norm.bias)
    )
    torch.testing.assert_close(squared_changes(groups.values(), net)["wide"], expected.double(), rtol=1e-4, atol=1e-12)


def test_what_cannot_be_drawn_fails_before_the_first_epoch(tmp_path: Path) -> None:
    """Where the loader gives what the model does not take."""
    pruning = ChannelPruning("reconstruction", example_input=torch.zeros(1, 3, 8, 8))
    with pytest.raises(MisconfigurationException, match="No part of .* matches the example input"):
        fit(seeded(Flat), tmp_path, pruning)
