"""Which checkpoint is the best: among those at final sparsity only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from lightning_compress.packages import Callback, MisconfigurationException
from lightning_compress.pruning import ChannelPruning

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class FinalMetric(Callback):
    """Withholds a metric until the model is at its final sparsity, so that the best checkpoint is one of those.

    The best epoch by ``val_loss`` is usually an early one, before much was pruned. This callback adds the metric
    ``val_loss_final``, which is as bad as can be (infinite) as long as a :class:`ChannelPruning` of the Trainer has
    something left to mask, and ``val_loss`` from then on. A `ModelCheckpoint` that monitors it replaces whatever it
    saved before by the first checkpoint at final sparsity.

    The metric is one of the validation, or one that is logged in ``training_step``. What the LightningModule logs in
    its ``on_train_epoch_end`` comes after the callbacks, so that this one would see the value of the epoch before. The
    patience of an `EarlyStopping` that monitors it has to outlast the pruning.

    Args:
        monitor: name of the metric, as it is logged.
        mode: ``"min"`` where lower is better, ``"max"`` where higher is.

    Raises:
        MisconfigurationException: for another mode, and where a fit is set up without a :class:`ChannelPruning`.

    Example:
        >>> from pytorch_lightning.callbacks import ModelCheckpoint
        >>> final = FinalMetric("val_loss")
        >>> callbacks = [ChannelPruning(amount=0.5), final, ModelCheckpoint(monitor=final.name)]
        >>> final.name
        'val_loss_final'
    """

    def __init__(self, monitor: str, mode: str = "min") -> None:
        super().__init__()
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"`mode` is 'min' or 'max', got {mode!r}.")
        self.monitor, self.mode = monitor, mode

    @property
    def name(self) -> str:
        """The metric to monitor."""
        return f"{self.monitor}_final"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not _prunings(trainer):
            raise MisconfigurationException(
                f"`FinalMetric({self.monitor!r})` waits for the end of a pruning, and the Trainer has no "
                "`ChannelPruning`."
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Here all metrics of the validation are in, and checkpoints are written after all other callbacks.
        if not trainer.sanity_checking:
            self._update(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update(trainer)

    def _update(self, trainer: Trainer) -> None:
        metrics, worst = trainer.callback_metrics, math.inf if self.mode == "min" else -math.inf
        final = all(pruning.finished for pruning in _prunings(trainer))
        if final and self.monitor not in metrics:
            return  # of a training metric nothing is known yet in the first validation
        with torch.inference_mode(False):  # what is made here is kept over the next training steps
            metrics[self.name] = metrics[self.monitor].detach().clone() if final else torch.tensor(worst)


def _prunings(trainer: Trainer) -> list[ChannelPruning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ChannelPruning)]  # type: ignore[attr-defined]
