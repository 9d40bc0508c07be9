"""Removal of what is masked, at the end of the fit, and the compacted checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.utils import prune
from torch.optim import Optimizer
from typing_extensions import override

import engine
from engine.checkpoint import KEY, content_of
from engine.errors import CheckpointError, EngineError, VerificationError
from engine.history import certify, is_compacted
from lightning_compress import checkpoint as files
from lightning_compress.base import CompressionCallback
from lightning_compress.complexity import ComplexityMonitor
from lightning_compress.loading import follow_checkpoints
from lightning_compress.masking import MaskingCallback, active_masks
from lightning_compress.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class ModelCompaction(CompressionCallback):
    """Removes at the end of the fit what is masked, in place, verifies it, and writes the compacted checkpoint.

    It acts in ``on_fit_end``: by then every ``on_train_end`` has run (``ModelPruning`` has made its masks permanent,
    averaging callbacks have put their averages in), DDP is unwrapped and SyncBN reverted, whatever the order of the
    callbacks, and however the fit ended: by its length, early stopping, ``max_time`` or ``trainer.should_stop``.
    Lightning has moved the module to the CPU; it goes back to the trainer's device for the compaction. On Ctrl-C
    Lightning calls ``on_exception`` only: then it acts there. Other exceptions leave the model alone.

    What is masked: the masks that callbacks of the Trainer hold and those of `torch.nn.utils.prune`; where there are
    none, the zeros in the weights.

    Args:
        dirpath: local folder of the checkpoint; by default the Trainer's log folder.
        filename: its name, without ``.ckpt``.
        confidence: number of random samples to verify with; 0 runs nothing.
        on_failure: what to do where the model cannot be compacted: ``"warn"`` leaves the masked model as it is and
            writes its checkpoint, ``"raise"`` raises.
        save: whether to write the checkpoint.
        model: path of the model inside the LightningModule.
        example_input: what the model takes.

    Attributes:
        checkpoint_path: the checkpoint, once written.
        plan: what was removed, once compacted.
        certificate: the verdict of the verification, once compacted.
        failure: why the model was not compacted, where that was tried and failed.

    Example:
        >>> compaction = ModelCompaction(on_failure="raise")
        >>> compaction.plan is None
        True
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "compacted",
        confidence: int = 8,
        on_failure: str = "warn",
        save: bool = True,
        model: str | None = None,
        example_input: Any = None,
    ) -> None:
        super().__init__(model, example_input)
        if on_failure not in ("warn", "raise"):
            raise MisconfigurationException(f"`on_failure` is 'warn' or 'raise', got {on_failure!r}.")
        if isinstance(confidence, bool) or not isinstance(confidence, int) or confidence < 0:
            raise MisconfigurationException(f"`confidence` is a number of samples from 0 on, got {confidence!r}.")
        if dirpath is not None and "://" in str(dirpath):
            raise MisconfigurationException(f"`dirpath` is a local folder, got {str(dirpath)!r}.")
        self.dirpath, self.filename, self.save = dirpath, filename, save
        self.confidence, self.on_failure = confidence, on_failure
        self._reset()

    def _reset(self) -> None:
        self.checkpoint_path: str | None = None
        self.plan: engine.Plan | None = None
        self.certificate: engine.Certificate | None = None
        self.failure: str | None = None
        self._folder: Path | None = None
        self._training = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        follow_checkpoints(pl_module)
        if stage != "fit":
            return
        launcher = trainer.strategy.launcher
        if launcher is not None and "_MultiProcessingLauncher" in [c.__name__ for c in type(launcher).__mro__]:
            raise MisconfigurationException(
                "`ModelCompaction` does not work with strategies that fork or spawn their processes from this one: the "
                "compacted weights do not fit the module that stays behind here. Use `strategy='ddp'`."
            )
        self._reset()
        # All ranks take part in finding the folder, so it cannot wait for an interrupt.
        self._folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # An example input that is missing or rejected is an error before the first epoch, not after the last.
        self.example(trainer, pl_module)
        self._training = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        was, device = pl_module.device, trainer.strategy.root_device
        _move(pl_module, trainer.optimizers, device)
        try:
            self._finish(trainer, pl_module, alone=False)
        finally:
            _move(pl_module, trainer.optimizers, was)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self._training:
            self._finish(trainer, pl_module, alone=True)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Whoever saves after the compaction (on Ctrl-C, OnExceptionCheckpoint does) saves small weights: the plan
        # goes along.
        if is_compacted(pl_module):
            checkpoint[KEY] = content_of(pl_module)

    def _finish(self, trainer: Trainer, pl_module: LightningModule, alone: bool) -> None:
        """Compact and save; ``alone`` means without talking to the other ranks, which may be gone."""
        self._training = False
        alone = alone or trainer.world_size == 1
        try:
            self._compact(trainer, pl_module, alone)
        except EngineError as error:
            self.failure = str(error)
            if self.on_failure == "raise":
                raise
            rank_zero_warn(f"The model is not compacted, and is as it was: {error}")
        else:
            if self.plan is None:
                rank_zero_info("ModelCompaction: nothing is masked that could be removed, so nothing changes.")
                return
            rank_zero_info(f"ModelCompaction:\n{self.plan}\n{self.certificate}")
        if self.save and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(trainer, pl_module, alone)

    def _compact(self, trainer: Trainer, pl_module: LightningModule, alone: bool) -> None:
        path, model = self.target(pl_module)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        holders = [callback for callback in callbacks if isinstance(callback, MaskingCallback)]
        monitors = [callback for callback in callbacks if isinstance(callback, ComplexityMonitor)]
        for holder in holders:
            holder.enforce(pl_module)
        for monitor in monitors:
            monitor.record(trainer, pl_module)
        masks = active_masks(callbacks, pl_module, path)
        _make_permanent(model)
        plan, certificate = self._apply(trainer, pl_module, masks or None, alone)
        if plan.is_empty:
            return
        self.plan, self.certificate = plan, certificate
        for holder in holders:
            holder.forget()
        for monitor in monitors:
            monitor.record(trainer, pl_module, compacted=True)

    def _apply(
        self, trainer: Trainer, pl_module: LightningModule, masks: Any, alone: bool
    ) -> tuple[engine.Plan, engine.Certificate]:
        model, example, optimizers = self.target(pl_module)[1], self.example(trainer, pl_module), trainer.optimizers
        if alone:
            return _speed_up(model, example, masks, self.confidence, optimizers)
        # Rank 0 decides and verifies, the others do the same: rounding must not make two different models of one.
        found: tuple[Any, ...] = ()
        if trainer.is_global_zero:
            try:
                plan, certificate = _speed_up(model, example, masks, self.confidence, optimizers)
                found = (plan.state_dict(), certificate.state_dict(), None)
            except EngineError as error:
                found = (None, None, str(error))
        plan_state, certificate_state, failure = trainer.strategy.broadcast(found)
        if failure is not None:
            raise VerificationError(failure)
        if not trainer.is_global_zero:
            plan = engine.Plan.from_state_dict(plan_state)
            plan.apply(model, optimizer=optimizers or None)
            certificate = engine.Certificate.from_state_dict(certificate_state)
            if not plan.is_empty:
                certify(model, certificate.state_dict())
        return plan, certificate

    def _write(self, trainer: Trainer, pl_module: LightningModule, alone: bool) -> None:
        assert self._folder is not None
        path = self._folder / f"{self.filename}.ckpt"
        checkpoint = files.dump(trainer)  # on all ranks: metrics gather their states
        failure: str | None = None
        if trainer.is_global_zero:
            try:
                files.write(checkpoint, path)
            except (OSError, CheckpointError) as error:
                failure = f"The compacted checkpoint could not be written to {path}: {error}"
        failure = failure if alone else trainer.strategy.broadcast(failure)
        if failure is not None:
            raise CheckpointError(failure)
        self.checkpoint_path = str(path)


def _speed_up(
    model: nn.Module, example: Any, masks: Any, confidence: int, optimizers: list[Optimizer]
) -> tuple[engine.Plan, engine.Certificate]:
    speedup = engine.ModelSpeedup(model, example, masks, confidence=confidence)
    speedup.speedup_model(optimizer=optimizers or None)
    return speedup.plan, speedup.certificate


def _make_permanent(model: nn.Module) -> None:
    # The compacted model is to be of the class that was trained, without the parameters and buffers of the masking.
    for name, own in engine.read_masks(model).items():
        for parameter in own:
            prune.remove(model.get_submodule(name), parameter.removesuffix("_orig"))


def _move(pl_module: nn.Module, optimizers: list[Optimizer], device: torch.device) -> None:
    pl_module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[key] = value.to(device)
