"""Which checkpoint is the best: among those at final sparsity only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_compress.callbacks.pruning import ChannelPruning
from lightning_compress.trainer.packages import Callback, MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class FinalMetric(Callback):
    """Withholds a metric until the model is at its final sparsity, so that the best checkpoint is one of those.

    The best epoch by ``val_loss`` is usually an early one, before much was pruned. This callback adds the metric
    ``val_loss_final``, which is as bad as can be (infinite) as long as a :class:`ChannelPruning` of the Trainer has
    something left to mask, and ``val_loss`` from then on. A `ModelCheckpoint` that monitors it replaces whatever it
    saved before by the first checkpoint at final sparsity.

    That checkpoint is masked, and as large as the unpruned model, unless ``ModelCompaction(when=...)`` compacted before
    it was written: `ModelCompaction` compacts at the end of the fit, and writes a checkpoint of its own, of the last
    epoch. ``trainer.test(ckpt_path="best")`` therefore tests the masked network; `compact_checkpoint` makes the small
    one of it::

        trainer.test(module, ckpt_path="best")  # masked, of the best epoch at final sparsity
        trainer.test(module, ckpt_path=compaction.checkpoint_path)  # small, of the last epoch
        small = compact_checkpoint(saver.best_model_path, MyModule, "best-small.ckpt")
        trainer.test(small)  # small, of the best epoch at final sparsity

    The metric is one of the validation, or one that is logged in ``training_step``. What the LightningModule logs in
    its ``on_train_epoch_end`` comes after the callbacks, so that this one would see the value of the epoch before. An
    `EarlyStopping` may monitor it too, with ``check_finite=False``: its patience counts from final sparsity on.

    Args:
        monitor: name of the metric, as it is logged.
        mode: ``"min"`` where lower is better, ``"max"`` where higher is; None: as the callbacks say that monitor the
            metric, ``"min"`` where there are none.

    Raises:
        MisconfigurationException: for another mode; and where a fit is set up without a :class:`ChannelPruning`, with a
            callback that monitors the metric in another mode, or one that would stop the fit at an infinite value.

    Example:
        >>> from pytorch_lightning.callbacks import ModelCheckpoint
        >>> final = FinalMetric("val_loss")
        >>> callbacks = [ChannelPruning(amount=0.5), final, ModelCheckpoint(monitor=final.name)]
        >>> final.name
        'val_loss_final'
    """

    def __init__(self, monitor: str, mode: str | None = None) -> None:
        super().__init__()
        if mode not in ("min", "max", None):
            raise MisconfigurationException(f"`mode` is 'min' or 'max', got {mode!r}.")
        self.monitor, self.mode = monitor, mode
        self._worst = math.inf

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
        if stage == "fit":
            self._worst = -math.inf if self._agreed(trainer) == "max" else math.inf

    def _agreed(self, trainer: Trainer) -> str:
        """The mode of all callbacks that monitor the metric."""
        said = {} if self.mode is None else {"FinalMetric": self.mode}
        for callback in self._readers(trainer):
            said[type(callback).__name__] = callback.mode
            if getattr(callback, "check_finite", False):
                raise MisconfigurationException(
                    f"`{type(callback).__name__}` would stop the fit at once: {self.name!r} is infinite until all is "
                    "masked. Pass `check_finite=False`; its patience counts from then on."
                )
        if len(set(said.values())) > 1:
            modes = ", ".join(f"{name} {mode!r}" for name, mode in said.items())
            raise MisconfigurationException(f"Is a lower {self.monitor!r} better, or a higher one? `mode` is: {modes}.")
        return next(iter(said.values()), "min")

    def _readers(self, trainer: Trainer) -> list[Any]:
        """Callbacks that monitor the metric."""
        monitors = (c for c in trainer.callbacks if getattr(c, "monitor", None) == self.name)  # type: ignore[attr-defined]
        return [callback for callback in monitors if hasattr(callback, "mode")]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        late = [end for pruning in _prunings(trainer) if (end := pruning.too_late(trainer)) is not None]
        if late:
            rank_zero_warn(
                f"{self.name!r} stays infinite in this fit, so that no checkpoint is better than another: pruning is "
                f"done in {late[0]}, behind the end of the fit. Train longer, or give `end` an earlier value."
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
        metrics = trainer.callback_metrics
        final = all(pruning.finished for pruning in _prunings(trainer))
        if final and self.monitor not in metrics:
            return  # of a training metric nothing is known yet in the first validation
        with torch.inference_mode(False):  # what is made here is kept over the next training steps
            metrics[self.name] = metrics[self.monitor].detach().clone() if final else torch.tensor(self._worst)
        for callback in () if final else self._readers(trainer):
            if hasattr(callback, "wait_count"):
                callback.wait_count = -1  # it adds one of its own, before this or behind it


def _prunings(trainer: Trainer) -> list[ChannelPruning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ChannelPruning)]  # type: ignore[attr-defined]
