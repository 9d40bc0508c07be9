"""Pictures, texts and hyper-parameters for those loggers of Lightning that can show them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def log_figure(logger: Logger, tag: str, figure: Any, step: int) -> bool:
    """Show a matplotlib figure in a logger.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_figure``; one with ``log_image``, as W&B's has; or
            MLflow's, which keeps it as an artifact.
        tag: its name there.
        figure: the figure.
        step: the optimizer step that it belongs to.

    Returns:
        Whether the logger can show figures.

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
    """Show a text in a logger.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_text``; or MLflow's, which keeps it as an artifact.
        tag: its name there.
        markdown: the text.
        step: the optimizer step that it belongs to.

    Returns:
        Whether the logger can show texts.
    """
    add = _writer(logger, "add_text")
    if add is not None:
        add(tag, markdown, global_step=step)
    elif _is_mlflow(logger):
        logger.experiment.log_text(logger.run_id, markdown, f"{tag}.md")  # type: ignore[attr-defined]
    return add is not None or _is_mlflow(logger)


def log_settings(logger: Logger, settings: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Hand hyper-parameters to a logger, for the comparison of runs.

    TensorBoard shows the first ones that a run writes, with the columns of metrics that they name, so what Lightning
    logs later from the module has to be among them.

    Args:
        logger: any of Lightning's.
        settings: plain values by name.
        metrics: names of scalars that are logged in the run, to be shown beside, with their first values.
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
    """Put numbers into the summary of a run, by which loggers list and sort runs.

    Args:
        logger: W&B's, or any whose ``experiment.summary`` has ``update``; or MLflow's, which shows the last value of a
            metric.
        numbers: by name.

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
    """Show how values are distributed, and scalars below the tag's first part in one chart.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_histogram``.
        tag: its name there.
        values: the values.
        step: the optimizer step that they belong to.

    Returns:
        Whether the logger can show distributions.
    """
    add = _writer(logger, "add_histogram")
    if add is None or not values:
        return False
    add(tag, torch.tensor(list(values)), global_step=step)
    return True


def log_layout(logger: Logger, category: str, charts: Mapping[str, str]) -> bool:
    """Show several scalars in one chart.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_custom_scalars``.
        category: heading of the charts.
        charts: title -> regular expression of tags.

    Returns:
        Whether the logger can do that.
    """
    add = _writer(logger, "add_custom_scalars")
    if add is not None:
        add({category: {title: ["Multiline", [tags]] for title, tags in charts.items()}})
    return add is not None


def _is_mlflow(logger: Logger) -> bool:
    """By the name of its class, which either namespace of Lightning may define."""
    return "MLFlowLogger" in [cls.__name__ for cls in type(logger).__mro__]


def _writer(logger: Logger, method: str) -> Any:
    writer = getattr(getattr(logger, "experiment", None), method, None)
    return writer if callable(writer) else None
