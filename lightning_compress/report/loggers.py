"""Figures, texts and hyperparameters for Lightning's loggers, as far as they support them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def log_figure(logger: Logger, tag: str, figure: Any, step: int) -> bool:
    """Log a matplotlib figure.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_figure``; one with ``log_image``, such as W&B's; or
            MLflow's, which stores it as an artifact.
        tag: name of the figure.
        figure: the figure.
        step: its optimizer step.

    Returns:
        Whether the logger supports figures.

    Example:
        >>> from pytorch_lightning.loggers import CSVLogger
        >>> log_figure(CSVLogger("unused"), "channels", None, 0)
        False
    """
    add = _writer(logger, "add_figure")
    if add is not None:
        add(tag, figure, global_step=step, close=False)
    elif hasattr(logger, "log_image"):
        logger.log_image(key=tag, images=[figure], step=step)
    elif _is_mlflow(logger):
        logger.experiment.log_figure(logger.run_id, figure, f"{tag}.png")  # type: ignore[attr-defined]
    return add is not None or hasattr(logger, "log_image") or _is_mlflow(logger)


def log_text(logger: Logger, tag: str, markdown: str, step: int) -> bool:
    """Log a text.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_text``; or MLflow's, which stores it as an
            artifact.
        tag: name of the text.
        markdown: the text.
        step: its optimizer step.

    Returns:
        Whether the logger supports texts.
    """
    add = _writer(logger, "add_text")
    if add is not None:
        add(tag, markdown, global_step=step)
    elif _is_mlflow(logger):
        logger.experiment.log_text(logger.run_id, markdown, f"{tag}.md")  # type: ignore[attr-defined]
    return add is not None or _is_mlflow(logger)


def log_settings(logger: Logger, settings: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Log hyperparameters, for the comparison of runs.

    TensorBoard shows the first hyperparameters of a run only, with the metrics that they name, so they have to include
    those of the module that Lightning logs later.

    Args:
        logger: any of Lightning's loggers.
        settings: plain values by name.
        metrics: initial values of the metrics to show beside them, by name.
    """
    writer = getattr(_writer(logger, "add_hparams"), "__self__", None)
    if writer is None:
        logger.log_hyperparams(dict(settings))
        return
    summary = importlib.import_module("torch.utils.tensorboard.summary")
    plain = (bool, int, float, str)
    shown = {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}
    for part in summary.hparams(shown, dict(metrics)):
        writer.file_writer.add_summary(part)
    getattr(logger, "hparams", {}).update(settings)


def log_summary(logger: Logger, numbers: Mapping[str, float]) -> bool:
    """Log numbers to the summary of a run, by which loggers list and sort runs.

    Args:
        logger: W&B's, or any whose ``experiment.summary`` has ``update``; or MLflow's, which shows the last value of a
            metric.
        numbers: numbers by name.

    Returns:
        Whether the logger has a summary.

    Example:
        >>> from pytorch_lightning.loggers import CSVLogger
        >>> log_summary(CSVLogger("unused"), {"compression/macs_left": 0.5})
        False
    """
    update = getattr(getattr(getattr(logger, "experiment", None), "summary", None), "update", None)
    if callable(update):
        update(dict(numbers))
        return True
    if _is_mlflow(logger):
        logger.log_metrics(dict(numbers))
        return True
    return False


def log_distribution(logger: Logger, tag: str, values: Sequence[float], step: int) -> bool:
    """Log a histogram of values.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_histogram``.
        tag: name of the histogram.
        values: the values.
        step: their optimizer step.

    Returns:
        Whether the logger supports histograms.
    """
    add = _writer(logger, "add_histogram")
    if add is None or not values:
        return False
    add(tag, torch.tensor(list(values)), global_step=step)
    return True


def log_layout(logger: Logger, category: str, charts: Mapping[str, str]) -> bool:
    """Define charts of several scalars.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_custom_scalars``.
        category: heading of the charts.
        charts: regular expression of tags by title.

    Returns:
        Whether the logger supports such charts.
    """
    add = _writer(logger, "add_custom_scalars")
    if add is not None:
        add({category: {title: ["Multiline", [tags]] for title, tags in charts.items()}})
    return add is not None


def _is_mlflow(logger: Logger) -> bool:
    """Whether a logger is an `MLFlowLogger` of either Lightning package."""
    return "MLFlowLogger" in [cls.__name__ for cls in type(logger).__mro__]


def _writer(logger: Logger, method: str) -> Any:
    writer = getattr(getattr(logger, "experiment", None), method, None)
    return writer if callable(writer) else None
