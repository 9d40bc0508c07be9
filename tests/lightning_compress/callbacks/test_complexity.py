"""Tests of the complexity monitor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils import prune

import engine
from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction
from lightning_compress.callbacks.complexity import measure, nonzero_masks, sparsity
from tests.lightning_compress.callbacks.test_repair import structured
from tests.lightning_compress.models import Net, Wrapped, fit, seeded

X = torch.ones(1, 3, 8, 8)
# 64 positions × (3·8·9 + 8·16·9 + 16·8·9) of the convolutions, and the linear layer.
MACS = 64 * (216 + 1152 + 1152) + 8 * 3
PARAMS = 216 + 16 + 1168 + 32 + 1160 + 27
# With half of the channels of both groups.
SMALL_MACS = 64 * (3 * 4 * 9 + 4 * 8 * 9 * 2) + 4 * 3
TAGS = ["macs", "flops", "params", "macs_compacted", "params_compacted"]


def test_measure_dense() -> None:
    """Multiply-accumulates and parameters are the hand count, FLOPs are twice as many, nothing is masked."""
    costs = measure(seeded(Net), X)
    assert costs["complexity/macs"] == costs["complexity/macs_compacted"] == MACS
    assert costs["complexity/flops"] == 2 * MACS
    assert costs["complexity/params"] == costs["complexity/params_compacted"] == PARAMS
    assert {name for name in costs if name.startswith("sparsity")} == {
        "sparsity/channels",
        "sparsity/stem",
        "sparsity/wide",
    }
    assert all(type(value) is int for name, value in costs.items() if name.startswith("complexity"))


def test_measure_is_per_sample() -> None:
    """The batch size of the example input does not matter."""
    assert measure(Net(), X.expand(4, -1, -1, -1))["complexity/macs"] == MACS


def test_measure_with_masks() -> None:
    """Masks change the prediction and the sparsity, not what the model costs now."""
    net = seeded(Net)
    groups = engine.dependency_groups(net, X)
    masks = engine.group_masks(groups, {"stem": torch.arange(8) < 4, "wide": torch.arange(16) < 8})
    costs = measure(net, X, dict(masks))
    assert costs["complexity/macs"] == MACS
    assert costs["complexity/macs_compacted"] == SMALL_MACS
    assert costs["sparsity/channels"] == costs["sparsity/stem"] == costs["sparsity/wide"] == 0.5


def test_sparsity_counts_channels() -> None:
    """Over all groups it is masked channels by channels: 4 of 8 and 0 of 16 make a sixth."""
    groups = engine.dependency_groups(seeded(Net), X)
    found = sparsity(groups, engine.group_masks(groups, {"stem": torch.arange(8) < 4}))
    assert found == {"sparsity/channels": 4 / 24, "sparsity/stem": 0.5, "sparsity/wide": 0.0}


def test_nonzero_masks_apply_the_buffers_of_prune() -> None:
    """Under torch.nn.utils.prune an entry counts as zero where its buffer says so."""
    net = seeded(Net)
    prune.ln_structured(net.wide, "weight", 0.5, n=1, dim=0)
    assert torch.equal(nonzero_masks(net)["wide"]["weight_orig"], net.wide.weight_mask.bool())
    assert measure(net, X)["sparsity/wide"] == 0.5


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of a TensorBoard event file as (step, value)."""
    events = EventAccumulator(str(next(folder.rglob("events.*")).parent)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_logger_gets_all_tags_over_the_epochs(tmp_path: Path) -> None:
    """TensorBoard and CSV both get every tag at the start, after each epoch and after compaction; it ends as
    predicted.
    """
    loggers = [TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")]
    monitor = ComplexityMonitor()
    fit(seeded(Wrapped), tmp_path, monitor, ChannelPruning(amount=0.5), ModelCompaction(), logger=loggers)
    found = scalars(tmp_path / "tb")
    steps = [0, 3, 6, 9, 10]
    for tag in [*(f"complexity/{t}" for t in TAGS), "sparsity/channels", "sparsity/stem", "sparsity/wide"]:
        assert [step for step, _ in found[tag]] == steps, tag
    assert [step for step, ms in found["latency/forward_ms"] if ms > 0] == steps
    assert [v for _, v in found["complexity/macs"]] == [MACS] * 4 + [SMALL_MACS]
    assert [v for _, v in found["complexity/flops"]] == [2 * MACS] * 4 + [2 * SMALL_MACS]
    assert [v for _, v in found["sparsity/wide"]] == [0.0, 0.0, 7 / 16, 0.5, 0.0]
    assert found["complexity/macs_compacted"][-2][1] == found["complexity/macs"][-1][1]
    assert found["complexity/params_compacted"][-2][1] == found["complexity/params"][-1][1]
    csv = next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    assert all(f"complexity/{t}" in csv for t in TAGS) and f",{SMALL_MACS}," in csv


def test_prediction_equals_measurement_as_integers(tmp_path: Path) -> None:
    """What the last record before compaction predicts is what the record after it measures, in exact integers."""
    monitor = ComplexityMonitor()
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.4), ModelCompaction(), monitor)
    before, after = monitor.history[-2:]
    for cost in ("macs", "params"):
        assert before[f"complexity/{cost}"] > before[f"complexity/{cost}_compacted"] == after[f"complexity/{cost}"]
        assert after[f"complexity/{cost}"] == after[f"complexity/{cost}_compacted"]
        assert type(after[f"complexity/{cost}"]) is int


@pytest.mark.parametrize("order", [1, -1])
def test_prediction_includes_the_last_pruning(tmp_path: Path, order: int) -> None:
    """ModelPruning prunes when the last epoch ends, before or after the monitor: the last prediction knows of it."""
    module, monitor = seeded(Wrapped), ComplexityMonitor()
    callbacks = [monitor, structured(module, "wide"), MaskConflictRepair()][::order]
    fit(module, tmp_path, *callbacks, ModelCompaction(on_failure="raise"), max_epochs=1)
    before, after = monitor.history[-2:]
    assert MACS > before["complexity/macs_compacted"] == after["complexity/macs"]
    assert before["complexity/params_compacted"] == after["complexity/params"]


def test_zeros_that_are_not_masked_are_not_predicted(tmp_path: Path) -> None:
    """Under explicit masks a channel that happens to be zero stays, in the prediction and in the compacted model."""

    class Zero(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            index = pruning.masks["wide"]["bias"].nonzero().flatten()[0]
            for parameter in (*pl_module.net.wide.parameters(), *pl_module.net.wide_norm.parameters()):
                parameter.data[index] = 0

    monitor, pruning = ComplexityMonitor(), ChannelPruning(amount=0.5)
    fit(seeded(Wrapped), tmp_path, monitor, pruning, ModelCompaction(on_failure="raise"), Zero())
    for entry, cost in ((monitor.history[-2], "macs_compacted"), (monitor.history[-1], "macs")):
        assert entry[f"complexity/{cost}"] == SMALL_MACS
    assert monitor.history[-1]["complexity/macs_compacted"] == SMALL_MACS


def test_what_starts_at_zero_is_not_predicted_to_go(tmp_path: Path) -> None:
    """A head of zeros makes all before it useless to the letter: the curve starts at the whole all the same."""
    module, monitor = seeded(Wrapped), ComplexityMonitor(latency_runs=0)
    torch.nn.init.zeros_(module.net.fc.weight)
    fit(module, tmp_path, monitor, ChannelPruning(amount=0.5))
    first = monitor.history[0]
    assert first["complexity/macs_compacted"] == first["complexity/macs"]
    assert first["complexity/params_compacted"] == first["complexity/params"] and first["sparsity/channels"] == 0


def test_alone_it_reads_zeros_from_the_weights(tmp_path: Path) -> None:
    """Without a callback that holds masks, zeros in the weights are what a compaction would remove."""
    module = seeded(Wrapped)
    for parameter in (
        module.net.wide.weight,
        module.net.wide.bias,
        module.net.wide_norm.weight,
        module.net.wide_norm.bias,
    ):
        parameter.data[:8] = 0
    monitor = ComplexityMonitor()
    fit(module, tmp_path, monitor, max_epochs=1, limit_train_batches=0.0)
    assert monitor.history == []
    monitor = ComplexityMonitor()
    fit(module, tmp_path, monitor, max_epochs=1)
    assert monitor.history[0]["sparsity/wide"] == 0.5
    assert monitor.history[0]["complexity/macs_compacted"] == 64 * (216 + 1152) + 24


def test_the_fit_is_not_changed(tmp_path: Path) -> None:
    """Measuring leaves the training bit for bit as it is."""
    plain, watched = seeded(Wrapped), seeded(Wrapped)
    fit(plain, tmp_path)
    fit(watched, tmp_path, ComplexityMonitor())
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )
