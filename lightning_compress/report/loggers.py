"""Pictures, texts and hyper-parameters for those loggers of Lightning that can show them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def log_figure(logger: Logger, tag: str, figure: Any, step: int) -> bool:
    """Show a matplotlib figure in a logger.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_figure``; or one with ``log_image``, as W&B's has.
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
    return add is not None or hasattr(logger, "log_image")


def log_text(logger: Logger, tag: str, markdown: str, step: int) -> bool:
    """Show a text in a logger.

    Args:
        logger: TensorBoard's, or any whose ``experiment`` has ``add_text``.
        tag: its name there.
        markdown: the text.
        step: the optimizer step that it belongs to.

    Returns:
        Whether the logger can show texts.
    """
    add = _writer(logger, "add_text")
    if add is not None:
        add(tag, markdown, global_step=step)
    return add is not None


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


def _writer(logger: Logger, method: str) -> Any:
    writer = getattr(getattr(logger, "experiment", None), method, None)
    return writer if callable(writer) else None
