"""The report at the end of a fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import engine
from engine.errors import VerificationError
from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    CompressionReport,
    MaskConflictRepair,
    ModelCompaction,
)
from lightning_compress.callbacks.report import arguments, settings
from lightning_compress.report.content import sections
from lightning_compress.report.page import html
from lightning_compress.report.stages import against_cost
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Base, Root, Wrapped, fit, seeded, trainer


def quiet(**options: Any) -> CompressionReport:
    """A report that writes its page only."""
    return CompressionReport(**{"terminal": "none", "figures": False, "latency_runs": 1, **options})


@pytest.mark.parametrize("last", [True, False])
def test_the_order_of_the_callbacks_does_not_matter(tmp_path: Path, last: bool) -> None:
    """Before or behind the others it sees the dense model and the compacted one, and writes the page."""
    report, monitor, compact = quiet(), ComplexityMonitor(latency_runs=0), ModelCompaction(confidence=1)
    others = [ChannelPruning(amount=0.5), monitor, compact]
    module = seeded(Wrapped)
    fit(module, tmp_path, *(others if last else []), report, *([] if last else others))
    found = report.report
    assert found is not None and found.verdict[0] == "good" and found.model == "Net"
    assert found.before.macs == monitor.history[0]["complexity/macs"]
    assert found.after.macs == monitor.history[-1]["complexity/macs"] < found.before.macs / 2
    assert found.plan is compact.plan and found.certificate is compact.certificate
    assert list(found.history) == monitor.history
    assert found.latency is compact.latency is not None and found.latency.runs == 1
    assert report.path == tmp_path / "compression.html" and "Compacted" in report.path.read_text()
    assert next(module.parameters()).device.type == "cpu"


def test_a_fit_without_compaction_reports_the_prediction(tmp_path: Path) -> None:
    """What the masks would leave is what compaction would measure."""
    report = quiet()
    fit(seeded(Root), tmp_path, report, ChannelPruning(amount=0.5), MaskConflictRepair())
    assert report.report is not None and report.report.plan is None
    again = ComplexityMonitor(latency_runs=0)
    fit(seeded(Root), tmp_path, ChannelPruning(amount=0.5), MaskConflictRepair(), again, ModelCompaction(confidence=1))
    last = again.history[-1]
    assert report.report.predicted == (last["complexity/macs"], last["complexity/params"])


@pytest.mark.parametrize("outer", [True, False])
def test_a_part_that_was_compacted(tmp_path: Path, outer: bool) -> None:
    """A compaction of a part of what is reported on, or of more, is one; the plan says whose names it has."""
    paths = ("", "features") if outer else ("features", "")
    report, compaction = quiet(model=paths[0]), ModelCompaction(model=paths[1], on_failure="raise")
    fit(seeded(Root), tmp_path, ChannelPruning(amount=0.5), MaskConflictRepair(), compaction, report)
    assert report.report is not None and report.report.plan is not None
    assert report.report.verdict[0] == "good"
    leads = [section.lead for section in sections(report.report) if section.title in ("Plan", "Certificate")]
    assert [(" of `features`" in lead) for lead in leads] == [outer, outer]


def test_a_failed_compaction_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is on the page, in red."""

    def fail(*args: Any, **options: Any) -> Any:
        raise VerificationError("They differ at stem.")

    monkeypatch.setattr(engine.ModelSpeedup, "compacting", fail)
    report = quiet()
    with pytest.warns(UserWarning, match="They differ at stem"):
        fit(seeded(Wrapped), tmp_path, report, ChannelPruning(amount=0.5), ModelCompaction())
    assert report.report is not None
    assert report.report.verdict == ("bad", "Not compacted. They differ at stem.")


def test_tensorboard_shows_all(tmp_path: Path) -> None:
    """Pictures, tables, and the settings with the module's own, in one run."""
    pytest.importorskip("matplotlib")
    logger = TensorBoardLogger(tmp_path)
    callbacks = [ChannelPruning(amount=0.5), ComplexityMonitor(), ModelCompaction(confidence=1)]
    fit(seeded(Wrapped), tmp_path, quiet(figures=True), *callbacks, logger=logger)
    found = EventAccumulator(logger.log_dir).Reload()
    assert set(found.Tags()["images"]) == {"compression/dependency", "compression/channels"}  # nothing was scored
    tags = {f"compression/{name}/text_summary" for name in ("report", "plan", "certificate")}
    assert tags <= set(found.Tags()["tensors"])
    hparams = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"ChannelPruning/amount" in hparams and b"width" in hparams
    assert b"round_to" not in hparams  # a default one
    assert not any(name in hparams for name in (b"latency_runs", b"on_failure", b"confidence", b"save"))
    assert b"complexity/macs" in found.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert (Path(logger.log_dir) / "compression.html").is_file()


def test_a_resumed_fit_compares_with_the_first_start(tmp_path: Path) -> None:
    """The model of before comes back from the checkpoint, not from the masked one."""
    first = quiet()
    half = fit(seeded(Wrapped), tmp_path, first, ChannelPruning(amount=0.5))
    half.save_checkpoint(tmp_path / "last.ckpt")
    second = quiet(latency_runs=0)
    resumed = trainer(tmp_path, second, ChannelPruning(amount=0.5), max_epochs=4)
    resumed.fit(seeded(Wrapped), ckpt_path=tmp_path / "last.ckpt")
    assert first.report is not None and second.report is not None
    assert second.report.before == first.report.before


class Interrupt(Callback):
    """Ctrl-C in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Interrupt."""
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


def test_ctrl_c_reports_what_was_reached(tmp_path: Path) -> None:
    """Behind ModelCompaction, as it says."""
    report = quiet()
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", end=0)
    with pytest.raises(SystemExit):
        fit(seeded(Wrapped), tmp_path, pruning, ModelCompaction(confidence=1), report, Interrupt())
    assert report.report is not None and report.report.verdict[0] == "good"


def test_settings_are_the_arguments_in_plain_values() -> None:
    """Functions by name, mappings and lists as text, twice the same callback apart; what is None is left out."""

    def mine(group: engine.Group, get: Any) -> torch.Tensor:
        return torch.ones(group.size)

    class Holder:
        callbacks = [
            ChannelPruning(mine, amount={"a*": 0.5}, layers=["a*", "b"]),
            ChannelPruning("l2", target="macs", scope="global", round_to=8, start=2),
            MaskConflictRepair(),
        ]

    found = settings(Holder())  # type: ignore[arg-type]
    assert list(found) == ["ChannelPruning", "ChannelPruning2", "MaskConflictRepair"]
    first = found["ChannelPruning"]
    assert first["criterion"].endswith("mine") and first["amount"] == "a*: 0.5" and first["layers"] == "a*, b"
    second = {name: found["ChannelPruning2"][name] for name in ("criterion", "target", "scope", "round_to", "start")}
    assert second == {"criterion": "l2", "target": "macs", "scope": "global", "round_to": 8, "start": 2}
    assert "exclude" not in found["ChannelPruning2"]
    assert arguments(MaskConflictRepair()) == {"policy": "union"}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"terminal": "rich", "figures": False}, "rich"), ({"terminal": "plain"}, "matplotlib.*figures=False")],
)
def test_a_missing_package_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """With the extra to install and the argument to choose."""
    found = importlib.util.find_spec
    missing = {"rich", "matplotlib"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in missing else found(n, *a))
    with pytest.raises(MisconfigurationException, match=message):
        fit(seeded(Wrapped), tmp_path, CompressionReport(**options))


class Tokens(Base):
    """Embeddings that feed a residual sum, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.back = nn.Embedding(7, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.example_input_array = nn.Linear(8, 3), torch.zeros(1, 4, dtype=torch.long)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of sentences of tokens."""
        x = self.table(tokens)
        return self.head((x + self.back(self.inner(x).relu())).mean(1))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens made of images."""
        return self((x.flatten(1)[:, :4].abs() * 3).long().clamp(max=6))


def test_an_embedding_that_feeds_a_residual(tmp_path: Path) -> None:
    """It is coupled with linear layers, and drawn with them, in the figures and on the page."""
    pytest.importorskip("matplotlib")
    report, logger = quiet(figures=True), TensorBoardLogger(tmp_path)
    callbacks = [ChannelPruning(amount=0.5), MaskConflictRepair(), ModelCompaction(confidence=1)]
    fit(seeded(Tokens), tmp_path, report, *callbacks, logger=logger)
    assert report.report is not None and report.report.verdict[0] == "good"
    axis = next(axis for axis in report.report.before.axes if "table" in axis.layers)
    assert (
        axis.layers == ("table", "back")
        and {layer.name: layer.channels for layer in report.report.before.layers}["table"] == 8
    )
    assert "compression/dependency" in EventAccumulator(logger.log_dir).Reload().Tags()["images"]


class Scored(Wrapped):
    """Logs an accuracy that rises by epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log."""
        self.log("val_acc", torch.tensor(0.5 + self.current_epoch / 10))


class Runs(TensorBoardLogger):
    """A logger whose experiment has a summary, as W&B's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writer = super().experiment
        self.writer.summary = {}

    @property
    def experiment(self) -> Any:
        """The writer."""
        return self.writer


def test_accuracy_against_cost(tmp_path: Path) -> None:
    """The dense network, the masked one right after pruning and at the end, and the compacted one, with their costs."""
    report, logger = quiet(), Runs(tmp_path)
    pruning, limits = ChannelPruning(amount=0.5, start=2, end=2), {"limit_val_batches": 1}
    run = trainer(tmp_path, report, pruning, ModelCompaction(confidence=1), max_epochs=5, logger=logger, **limits)
    run.fit(seeded(Scored))
    content = report.report
    assert content is not None
    table = [(stage.name, stage.macs, round(stage.metrics["val_acc"], 3)) for stage in content.stages]
    dense, small = content.before.macs, content.after.macs
    wide = [("dense", dense, 0.6), ("masked", dense, 0.7), ("recovered", dense, 0.9)]
    assert table == [*wide, ("compacted", small, 0.9)]
    assert sections(content)[0].title == "Accuracy against cost"
    gained = logger.writer.summary
    assert gained["compression/macs_left"] == small / dense and gained["compression/verified"] == 1.0
    assert gained["compression/val_acc_dense"] == pytest.approx(0.6) and gained["compression/speedup"] > 0
    assert set(content.facts) == {"date", "device", "run"} and content.facts["device"].startswith("CPU")
    assert content.settings["ChannelPruning"] == {"start": 2, "end": 2}  # half is the default
    metric, points = against_cost(content.stages)
    assert (metric, [name for name, _, _ in points]) == ("val_acc", ["dense", "masked", "recovered", "compacted"])
    shown = html(content)
    assert shown.count('<circle class="set') >= 4 and "val_acc over the MACs" in shown
    resumed = quiet()
    resumed.load_state_dict(report.state_dict())
    assert resumed._points == report._points
