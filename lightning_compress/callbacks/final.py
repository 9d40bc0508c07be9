"""A metric that selects the best checkpoint among those at final sparsity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from engine.bounds import check_kinds
from lightning_compress.callbacks.pruning import ChannelPruning
from lightning_compress.trainer.packages import Callback, MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class FinalMetric(Callback):
    """Withhold a metric until the model is at its final sparsity, so that the best checkpoint is at final sparsity.

    The best epoch by ``val_loss`` is usually an early one, before much was pruned. This callback adds the metric
    ``val_loss_final``, which is infinitely bad until every :class:`ChannelPruning` of the Trainer has masked its full
    amount, and equals ``val_loss`` from then on. A `ModelCheckpoint` that monitors it replaces any earlier checkpoint
    by the first one at final sparsity.

    That checkpoint is masked and as large as the unpruned model, unless ``ModelCompaction(when=...)`` compacted the
    model before: at the end of the fit, `ModelCompaction` compacts the last epoch and writes its own checkpoint.
    ``trainer.test(ckpt_path="best")`` therefore tests the masked network; `compact_checkpoint` compacts it::

        trainer.test(module, ckpt_path="best")  # masked, best epoch at final sparsity
        trainer.test(module, ckpt_path=compaction.checkpoint_path)  # compacted, last epoch
        small = compact_checkpoint(saver.best_model_path, MyModule, "best-small.ckpt")
        trainer.test(small)  # compacted, best epoch at final sparsity

    The metric must be logged in validation or in ``training_step``. The LightningModule's ``on_train_epoch_end`` runs
    after those of the callbacks, so a value logged there would be that of the previous epoch. An `EarlyStopping` may
    monitor the metric, too, with ``check_finite=False``: its patience starts at final sparsity.

    Args:
        monitor: name of the metric, as logged.
        mode: ``"min"`` if lower is better, ``"max"`` if higher is; None: the mode of the callbacks that monitor the
            metric, or ``"min"`` if there are none.

    Raises:
        MisconfigurationException: for another mode, and at the start of a fit without :class:`ChannelPruning`, with a
            callback that monitors the metric in another mode, or with one that would stop the fit at an infinite value.

    Example:
        >>> from pytorch_lightning.callbacks import ModelCheckpoint
        >>> final = FinalMetric("val_loss")
        >>> callbacks = [ChannelPruning(amount=0.5), final, ModelCheckpoint(monitor=final.name)]
        >>> final.name
        'val_loss_final'
    """

    def __init__(self, monitor: str, mode: str | None = None) -> None:
        check_kinds(FinalMetric.__init__, locals(), MisconfigurationException)
        super().__init__()
        if mode not in ("min", "max", None):
            raise MisconfigurationException(f"`mode` must be 'min' or 'max', got {mode!r}.")
        self.monitor, self.mode = monitor, mode
        self._worst = math.inf

    @property
    def name(self) -> str:
        """Name of the metric to monitor."""
        return f"{self.monitor}_final"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not _prunings(trainer):
            raise MisconfigurationException(
                f"`FinalMetric({self.monitor!r})` waits for the end of pruning, but the Trainer has no "
                "`ChannelPruning`."
            )
        if stage == "fit":
            self._worst = -math.inf if self._resolve_mode(trainer) == "max" else math.inf

    def _resolve_mode(self, trainer: Trainer) -> str:
        """Return the mode of all callbacks that monitor the metric."""
        modes = {} if self.mode is None else {"FinalMetric": self.mode}
        for callback in self._readers(trainer):
            modes[type(callback).__name__] = callback.mode
            if getattr(callback, "check_finite", False):
                raise MisconfigurationException(
                    f"`{type(callback).__name__}` would stop the fit at once: {self.name!r} is infinite until final "
                    "sparsity. Pass `check_finite=False`; its patience starts then."
                )
        if len(set(modes.values())) > 1:
            listed = ", ".join(f"{name} {mode!r}" for name, mode in modes.items())
            raise MisconfigurationException(
                f"Is a lower or a higher {self.monitor!r} better? The callbacks' `mode` differ: {listed}."
            )
        return next(iter(modes.values()), "min")

    def _readers(self, trainer: Trainer) -> list[Any]:
        """Return the callbacks that monitor the metric."""
        monitors = (c for c in trainer.callbacks if getattr(c, "monitor", None) == self.name)  # type: ignore[attr-defined]
        return [callback for callback in monitors if hasattr(callback, "mode")]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        late = [end for pruning in _prunings(trainer) if (end := pruning.too_late(trainer)) is not None]
        if late:
            rank_zero_warn(
                f"{self.name!r} is infinite throughout this fit, so it cannot select a checkpoint: pruning ends in "
                f"{late[0]}, after the end of the fit. Train longer, or set `end` to an earlier value."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(set(trainer.callback_metrics) - {self.name})) or "none"
            rank_zero_warn(
                f"`FinalMetric({self.monitor!r})`: no metric of that name was logged in this fit, so {self.name!r} "
                f"cannot select a checkpoint. Logged: {logged}."
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All validation metrics are available here, and checkpoints are written after all other callbacks.
        if not trainer.sanity_checking:
            self._update(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update(trainer)

    def _update(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        final = all(pruning.finished for pruning in _prunings(trainer))
        if final and self.monitor not in metrics:
            return  # a training metric is not available yet in the first validation
        with torch.inference_mode(False):  # the tensor is kept over the next training steps
            metrics[self.name] = metrics[self.monitor].detach().clone() if final else torch.tensor(self._worst)
        for callback in () if final else self._readers(trainer):
            if hasattr(callback, "wait_count"):
                callback.wait_count = -1  # the callback itself adds one, before or after this


def _prunings(trainer: Trainer) -> list[ChannelPruning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ChannelPruning)]  # type: ignore[attr-defined]
