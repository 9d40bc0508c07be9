"""Compaction of masked models, during training or at the end of the fit, and the compacted checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

import engine
from engine.bounds import check_kinds, check_number
from engine.compaction import KEY, is_compacted
from engine.errors import CheckpointError, EngineError
from engine.files import content_of
from lightning_compress.callbacks.base import CompressionCallback, timed_runs
from lightning_compress.callbacks.complexity import ComplexityMonitor
from lightning_compress.callbacks.masking import MaskWatch, active_masks, masking_callbacks
from lightning_compress.callbacks.shrinking import check_no_buffers, make_permanent, remember_compaction, shrink
from lightning_compress.callbacks.when import check_start, parse_when
from lightning_compress.checkpoints import compacted as files
from lightning_compress.checkpoints.saving import bytes_of, check_room, save
from lightning_compress.report.latency import Comparison, check_runs, compare, replica
from lightning_compress.report.plan import brief
from lightning_compress.trainer.launchers import bring_results_back
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.steps import EVALUATING, TRAINING
from lightning_compress.trainer.strategy import Job, parallel, shards

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class ModelCompaction(CompressionCallback):
    """Remove masked channels in place, verify the result, and write the compacted checkpoint.

    At the end of the fit it acts in ``on_fit_end``, after all ``on_train_end`` hooks, whatever the order of the
    callbacks: ``ModelPruning`` has made its masks permanent, averaging callbacks have stored their averages, DDP is
    unwrapped and SyncBN reverted. It does so however the fit ended: by its length, early stopping, ``max_time`` or
    ``trainer.should_stop``. Lightning has moved the module to the CPU by then; it is compacted on the trainer's device.
    On Ctrl-C, Lightning only calls ``on_exception``, so it acts there. Other exceptions leave the model unchanged.

    With ``when`` it also compacts during training: optimizers, schedulers, averaged copies, masks and their schedules,
    DDP and compiled code are updated, and training continues as it would have with masks. Then only channels that
    callbacks mask are removed: a weight that happens to be zero may still learn. Removals that would not be exact in
    train mode are rejected.

    At the end of the fit, the masks of the Trainer's callbacks and of `torch.nn.utils.prune` apply, or, if there are
    none, the zeros in the weights.

    Args:
        dirpath: local folder of the checkpoint; by default the Trainer's log folder.
        filename: its name; ``.ckpt`` is appended. If the file exists, ``-v1`` is appended, and so on.
        confidence: number of random samples to verify with; 0 skips verification.
        on_failure: what to do if the model cannot be compacted: ``"warn"`` keeps the masked model and writes its
            checkpoint, ``"raise"`` raises.
        save: whether to write the checkpoint.
        save_weights_only: whether to omit the states of optimizers, schedulers, loops and callbacks from the
            checkpoint. With ``False``, training can resume from it:
            ``trainer.fit(module, ckpt_path=compaction.checkpoint_path)``.
        model: path of the model inside the LightningModule.
        example_input: example input of the model.
        when: when to compact during training: one epoch or several (before their first batch), or a fraction (as soon
            as at least that fraction of the model's parameters would be removed). By default only at the end of the
            fit, where it always compacts.
        latency_runs: number of timed forward passes of the masked and of the compacted network, in turns, right after
            a compaction; warns if the compacted network is slower. With 0, nothing is timed unless another callback,
            such as `CompressionReport`, needs it. A copy of the masked network is kept until then.
        reindex: whether layers may lose channels that coupled layers keep, see `engine.ModelSpeedup`; useful for
            inconsistent masks. The predictions of `ComplexityMonitor` do not take it into account.
        steps: whether to preserve and verify the results of the LightningModule's steps, beside the model's forward:
            the evaluation steps, and with ``when`` the training step. They are traced once, on the first batch of their
            dataloader, with a stub Trainer. A step that cannot be traced is an error before the first epoch.
        plain_norms: which norms that lost channels become ordinary norms at the end of the fit: with ``"exact"``, RMS
            norms, which compute the same with another eps and weight scale; with True, layer norms and group norms too,
            which then compute a different function, as the certificate says. Supported neither with
            ``save_weights_only=False``, whose optimizer state fits the old scale, nor with sharded parameters.
        constants: names of arguments, attributes and buffers that keep their value, or patterns of them, as for
            `engine.trace`; they hold for all callbacks on the model.

    Attributes:
        checkpoint_path: path of the checkpoint, once written.
        plan: what was removed, once compacted; for several compactions, their composition.
        certificate: the verdict of the last verification, once compacted.
        failure: why compacting the model or writing its checkpoint failed, if it did.
        latency: the times of both networks, in milliseconds, if measured.
        not_timed: why they were not measured, if a callback needed them.

    Raises:
        MisconfigurationException: for an invalid argument.
        EngineError: with ``on_failure="raise"``, if the model cannot be compacted; the model is then unchanged.

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
        when: int | float | Sequence[int] | None = None,
        save_weights_only: bool = True,
        latency_runs: int = 0,
        reindex: bool = False,
        steps: bool = True,
        plain_norms: bool | str = False,
        constants: str | Sequence[str] | None = None,
    ) -> None:
        arguments, self.when = locals(), parse_when(when)
        check_kinds(ModelCompaction.__init__, arguments, MisconfigurationException)
        super().__init__(model, example_input, constants)
        if plain_norms not in (False, True, "exact"):
            raise MisconfigurationException(f"`plain_norms` must be False, True or 'exact', got {plain_norms!r}.")
        if plain_norms and not save_weights_only:
            raise MisconfigurationException(
                f"`plain_norms={plain_norms!r}` rescales weights, so the optimizer state that "
                "`save_weights_only=False` saves would no longer fit. Omit one of the two."
            )
        self.plain_norms, self.follows_steps = plain_norms, steps
        check_runs(latency_runs)
        self.latency_runs, self.reindex = latency_runs, reindex
        if on_failure not in ("warn", "raise"):
            raise MisconfigurationException(f"`on_failure` must be 'warn' or 'raise', got {on_failure!r}.")
        check_number(
            "confidence", confidence, 0, whole=True, what="a number of samples", error=MisconfigurationException
        )
        if dirpath is not None and "://" in str(dirpath):
            raise MisconfigurationException(f"`dirpath` must be a local folder, got {str(dirpath)!r}.")
        self.dirpath, self.filename, self.save = dirpath, filename.removesuffix(".ckpt"), save
        self.save_weights_only = save_weights_only
        self.confidence, self.on_failure = confidence, on_failure
        self._reset()
        bring_results_back()  # in the main process, if another process runs the fit

    def _reset(self) -> None:
        self.checkpoint_path: str | None = None
        self.plan: engine.Plan | None = None
        self.certificate: engine.Certificate | None = None
        self.failure: str | None = None
        self.latency: Comparison | None = None
        self.not_timed = ""
        self._folder: Path | None = None
        self._training = False
        self._epoch = -1
        self._watch = MaskWatch()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        bring_results_back()  # in the process that runs the fit
        if shards(trainer) and not masking_callbacks(trainer):
            raise MisconfigurationException(
                "With sharded parameters, `ModelCompaction` removes only channels that callbacks mask, but no callback "
                "of this Trainer masks any. Add `ChannelPruning`."
            )
        self._check_no_model_pruning(trainer)
        self._reset()
        # Determining the folder involves all ranks, so it cannot be left to the handling of an interrupt.
        self._folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        if self.save and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # The uncompacted size: nothing may turn out to be removable.
            check_room(trainer, self._folder / f"{self.filename}.ckpt", bytes_of(pl_module))

    def _check_no_model_pruning(self, trainer: Trainer) -> None:
        names = {cls.__name__ for callback in trainer.callbacks for cls in type(callback).__mro__}  # type: ignore[attr-defined]
        if self.when is not None and "ModelPruning" in names:
            raise MisconfigurationException(
                "`ModelPruning` keeps masks and copies of the weights that cannot be updated after a compaction during "
                "training. Omit `when` to compact at the end of the fit, or prune with `ChannelPruning`."
            )

    @override
    def steps(self) -> Sequence[str]:
        if not self.follows_steps:
            return ()
        return EVALUATING if self.when is None else (TRAINING, *EVALUATING)

    @override
    def why_not_sharded(self) -> str | None:
        if self.plain_norms:
            return f"`ModelCompaction(plain_norms={self.plain_norms!r})` is not implemented for sharded parameters."
        if self.reindex:
            return "`ModelCompaction(reindex=True)` reads the weights to find layers worth decoupling."
        return "`ModelCompaction(latency_runs=...)` runs the model on one rank." if self.latency_runs else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Fail before the first epoch, not after the last.
        check_start(self, trainer, pl_module, self.when, raises=self.on_failure == "raise")
        if not self.is_tried(trainer):
            self.trace(trainer, pl_module)
        self._training = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.when is None:
            return
        # At this point, whatever the order of the callbacks, all prunings at the start of the epoch or after the last
        # step are done, and no gradients are pending.
        for callback in masking_callbacks(trainer):
            callback.catch_up(trainer, pl_module)
        if self._is_due(trainer, pl_module):
            self._try(trainer, pl_module, training=True, alone=False)
            self._watch.changed(trainer)

    def _is_due(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        if not isinstance(self.when, float):
            due, self._epoch = trainer.current_epoch != self._epoch, trainer.current_epoch
            return due and trainer.current_epoch in self.when  # type: ignore[operator]
        return self._watch.changed(trainer) and self._dead(trainer, pl_module) >= self.when

    def _dead(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """Return the fraction of the model's parameters that a compaction would remove now."""
        path, model = self.target(pl_module)
        masks = active_masks(trainer.callbacks, pl_module, path)  # type: ignore[attr-defined]
        if not masks:
            return 0.0
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (whole, example):
            small = engine.count_flops_params(whole, example, verbose=False, masks=masks, graph=graph)[1]
        return 1 - small / sum(parameter.numel() for parameter in model.parameters())

    @property
    @override
    def state_key(self) -> str:
        return super().state_key if self.model is None else self._generate_state_key(model=self.model)

    @property
    def _legacy_state_key(self) -> Any:
        return type(self).__qualname__  # also with a `model`, before two compactions could have states of their own

    @override
    def state_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"plan": self.plan and self.plan.structure(), "certificate": self.certificate}
        own = {"epoch": self._epoch, "model": self.model}
        return {**own, **{name: part and part.state_dict() for name, part in parts.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("model", self.model) != self.model:
            return  # of another compaction
        self._epoch, plan, certificate = (state_dict[name] for name in ("epoch", "plan", "certificate"))
        self.plan = plan and engine.Plan.from_state_dict(plan)
        self.certificate = certificate and engine.Certificate.from_state_dict(certificate)

    def results(self) -> dict[str, Any]:
        """Return the results of the fit, for the main process if the fit ran in another one."""
        times = self.latency and self.latency.state_dict()
        own = {"checkpoint_path": self.checkpoint_path, "failure": self.failure, "latency": times}
        return {**self.state_dict(), **own, "not_timed": self.not_timed}

    def load_results(self, results: dict[str, Any]) -> None:
        """Load the results of a fit that ran in another process.

        Args:
            results: as `results` returned them there.
        """
        self.load_state_dict(results)
        self.checkpoint_path, self.failure = results["checkpoint_path"], results["failure"]
        self.latency = results["latency"] and Comparison.from_state_dict(results["latency"])
        self.not_timed = results["not_timed"]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        was, strategy = pl_module.device, parallel(trainer)
        strategy.move(pl_module, trainer.strategy.root_device)
        try:
            self._finish(trainer, pl_module, alone=False)
        finally:
            strategy.move(pl_module, was)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self._training:
            self._finish(trainer, pl_module, alone=True)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Checkpoints written after the compaction, as by OnExceptionCheckpoint on Ctrl-C, hold compacted weights, so
        # they need the plan.
        if is_compacted(pl_module):
            checkpoint[KEY] = content_of(pl_module)

    def _finish(self, trainer: Trainer, pl_module: LightningModule, alone: bool) -> None:
        """Compact and save; with ``alone``, without communicating with the other ranks, which may be gone."""
        self._training = False
        if alone and shards(trainer):
            rank_zero_warn("The model is not compacted: other processes that hold shards of it may be gone.")
            return
        alone = alone or parallel(trainer).alone
        failed = not self._try(trainer, pl_module, training=False, alone=alone)
        if self.plan is None and not failed:
            rank_zero_info("ModelCompaction: there are no masked channels to remove; the model is unchanged.")
        changed = failed or self.plan is not None or is_compacted(pl_module)  # by an earlier fit, and trained further
        if changed and self.save and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(trainer, pl_module, alone)

    def _try(self, trainer: Trainer, pl_module: LightningModule, *, training: bool, alone: bool) -> bool:
        """Compact if possible, and return whether it was."""
        before = _parameters(self.target(pl_module)[1])
        try:
            changed = self._compact(trainer, pl_module, training=training, alone=alone)
        except EngineError as error:
            self.failure = str(error)
            if self.on_failure == "raise":
                raise
            rank_zero_warn(f"The model was not compacted and is unchanged: {error}")
            return False
        if changed and self.plan is not None:
            self.failure = None
            after = _parameters(self.target(pl_module)[1])
            if not training:
                remember_compaction(pl_module, before, after)
            other_notes = () if self.certificate is None else self.certificate.notes
            rank_zero_info(f"ModelCompaction: {brief(self.plan, before, after, other_notes)}\n{self.certificate}")
        return True

    def _compact(self, trainer: Trainer, pl_module: LightningModule, *, training: bool, alone: bool) -> bool:
        """Compact, and return whether anything was removed."""
        path, model = self.target(pl_module)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [callback for callback in callbacks if isinstance(callback, ComplexityMonitor)]
        for callback in masking_callbacks(trainer):
            callback.enforce(pl_module)
        masks = active_masks(callbacks, pl_module, path)
        if training and not masks:
            return False
        for monitor in monitors:
            monitor.record(trainer, pl_module)
        if training:
            check_no_buffers(model)
        undo = None if training else make_permanent(model)
        try:
            example = self.example(trainer, pl_module)
            masked = self._masked_copy(trainer, model)
            graph = self.trace(trainer, pl_module, training or not self.save_weights_only, not training)
            plain = False if training else self.plain_norms
            job = Job(path, example, masks or None, graph, self.confidence, training, self.reindex, plain)
            plan, certificate = shrink(trainer, pl_module, job, alone)
        except BaseException:
            if undo is not None:
                undo()
            raise
        if plan.is_empty:
            return False
        self._time(trainer, masked, model, example)
        self.plan = plan if self.plan is None else self.plan.then(plan)
        self.certificate = certificate
        for monitor in monitors:
            monitor.record(trainer, pl_module, compacted=not active_masks(callbacks, pl_module, path))
        return True

    @override
    def timed_runs(self) -> int:
        return self.latency_runs

    def _masked_copy(self, trainer: Trainer, model: nn.Module) -> nn.Module | None:
        """Copy the masked network on rank 0 if a callback needs its latency."""
        self.latency, self.not_timed = None, ""
        if not timed_runs(trainer) or not trainer.is_global_zero:
            return None
        masked, self.not_timed = replica(model)
        return masked

    def _time(self, trainer: Trainer, masked: nn.Module | None, model: nn.Module, example: Any) -> None:
        if masked is None:
            return
        with trainer.precision_plugin.forward_context():
            self.latency = compare(masked, model, example, timed_runs(trainer))
        if self.latency_runs and self.latency.is_slower:
            rank_zero_warn(self.latency.advice)

    def _write(self, trainer: Trainer, pl_module: LightningModule, alone: bool) -> None:
        assert self._folder is not None
        # A rank that may be alone cannot gather states from the others.
        weights_only = self.save_weights_only or (alone and not parallel(trainer).alone)
        try:
            checkpoint = files.dump(trainer, weights_only)  # on all ranks: metrics gather their states
            self.checkpoint_path = save(trainer, checkpoint, self._folder / f"{self.filename}.ckpt", alone)
        except CheckpointError as error:
            self.failure = str(error)
            if self.on_failure == "raise":
                raise
            rank_zero_warn(self.failure)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
