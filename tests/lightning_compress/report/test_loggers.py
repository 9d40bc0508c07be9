"""Pictures, texts and settings in the loggers that can show them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning import loggers
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.plots import channels_figure
from lightning_compress import ChannelPruning, ComplexityMonitor, CompressionReport, ModelCompaction
from lightning_compress.report.content import gains
from lightning_compress.report.loggers import (
    log_distribution,
    log_figure,
    log_layout,
    log_settings,
    log_summary,
    log_text,
)
from tests.lightning_compress.models import Wrapped, fit, seeded

SETTINGS = {"ChannelPruning/amount": 0.5, "layers": ["a", "b"]}


def events(logger: TensorBoardLogger) -> EventAccumulator:
    """What was written."""
    logger.experiment.flush()
    return EventAccumulator(logger.log_dir).Reload()


def test_tensorboard_shows_pictures_and_texts(tmp_path: Path) -> None:
    """At the step that they are given."""
    pytest.importorskip("matplotlib")
    logger = TensorBoardLogger(tmp_path)
    assert log_figure(logger, "compression/channels", channels_figure({"conv": (1, 2)}), 7)
    assert log_text(logger, "compression/plan", "| a |", 7)
    found = events(logger)
    assert [image.step for image in found.Images("compression/channels")] == [7]
    (text,) = found.Tensors("compression/plan/text_summary")
    assert text.step == 7 and text.tensor_proto.string_val[0] == b"| a |"


def test_tensorboard_compares_settings_with_metrics(tmp_path: Path) -> None:
    """The first ones written count, so that what Lightning writes later does not hide them; no scalar is made up."""
    logger = TensorBoardLogger(tmp_path)
    log_settings(logger, SETTINGS, {"complexity/macs": 0.0})
    logger.log_hyperparams({"width": 8})
    logger.log_metrics({"complexity/macs": 5.0}, step=3)
    found = events(logger)
    metadata = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"ChannelPruning/amount" in metadata and b"['a', 'b']" in metadata
    assert b"complexity/macs" in found.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert [scalar.step for scalar in found.Scalars("complexity/macs")] == [3]
    logger.save()
    assert "ChannelPruning/amount: 0.5" in Path(logger.log_dir, "hparams.yaml").read_text()


def test_a_logger_of_numbers_only_is_passed_over(tmp_path: Path) -> None:
    """It says so, and still gets the settings."""
    logger = CSVLogger(tmp_path)
    assert not log_figure(logger, "a", None, 0) and not log_text(logger, "a", "b", 0)
    log_settings(logger, SETTINGS, {})
    logger.save()
    assert "ChannelPruning/amount: 0.5" in Path(logger.log_dir, "hparams.yaml").read_text()


class Images(CSVLogger):
    """A logger with W&B's method for pictures."""

    shown: list[tuple[str, int]] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        """Remember."""
        self.shown = [*self.shown, (key, step or 0)]


def test_a_logger_with_log_image_shows_pictures(tmp_path: Path) -> None:
    """Under its key."""
    logger = Images(tmp_path)
    assert log_figure(logger, "channels", None, 4)
    assert logger.shown == [("channels", 4)]


class Summary(CSVLogger):
    """As W&B's logger: its experiment has a summary, by which runs are listed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run = SimpleNamespace(summary={"other": 1})

    @property
    def experiment(self) -> Any:
        """The run."""
        return self.run


class MLFlowLogger(CSVLogger):
    """As MLflow's: what was logged last of a metric is what its table of runs shows."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        """Keep them."""
        self.last = dict(metrics)


def test_a_summary_says_what_was_gained(tmp_path: Path) -> None:
    """W&B's is updated, MLflow gets metrics, others are passed over."""
    numbers = {"compression/macs_left": 0.5}
    wandb, mlflow = Summary(tmp_path), MLFlowLogger(tmp_path)
    assert log_summary(wandb, numbers) and wandb.run.summary == {"other": 1, **numbers}
    assert log_summary(mlflow, numbers) and mlflow.last == numbers
    assert not log_summary(TensorBoardLogger(tmp_path), numbers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # MLflow's own, and its database's
def test_mlflow_keeps_what_was_gained(tmp_path: Path) -> None:
    """Of a real fit, read back from MLflow's database: the summary, the settings, the pictures and the texts."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sqlalchemy")  # mlflow-skinny comes without it
    client = pytest.importorskip("mlflow").tracking.MlflowClient(f"sqlite:///{tmp_path}/runs.db")
    client.create_experiment("pruning", f"file:{tmp_path}/artifacts")
    logger = loggers.MLFlowLogger("pruning", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    report = CompressionReport(terminal="none", latency_runs=1, dirpath=tmp_path)
    pruning, monitor = ChannelPruning(amount=0.5), ComplexityMonitor(latency_runs=0)
    fit(seeded(Wrapped), tmp_path, pruning, monitor, ModelCompaction(confidence=1), report, logger=logger)
    run = client.get_run(logger.run_id)
    gained = gains(report.report)
    assert gained["compression/verified"] == 1 and 0 < gained["compression/macs_left"] < 1
    assert gained.items() <= run.data.metrics.items()
    assert run.data.metrics["complexity/macs"] == gained["compression/macs"]
    assert run.data.params["ChannelPruning/amount"] == "0.5" and run.info.status == "FINISHED"
    artifacts = {artifact.path: artifact for artifact in client.list_artifacts(logger.run_id, "compression")}
    names = ("channels.png", "dependency.png", "report.md", "plan.md", "certificate.md")
    assert set(artifacts) >= {f"compression/{name}" for name in names}
    folder = tmp_path / "artifacts" / logger.run_id / "artifacts" / "compression"
    assert "same random inputs" in (folder / "certificate.md").read_text()


def test_tensorboard_has_distributions_and_several_lines_in_a_chart(tmp_path: Path) -> None:
    """The sparsities of the groups, as a histogram, and by a regular expression in one chart."""
    logger = TensorBoardLogger(tmp_path)
    assert log_distribution(logger, "sparsity/groups", [0.1, 0.5], 3)
    assert not log_distribution(CSVLogger(tmp_path), "sparsity/groups", [0.1], 3)
    assert log_layout(logger, "compression", {"sparsity": "sparsity/.*"})
    assert not log_layout(CSVLogger(tmp_path), "compression", {})
    written = events(logger)
    assert "sparsity/groups" in written.Tags()["histograms"]
    assert any("custom_scalars" in tag for tag in written.Tags()["tensors"])
