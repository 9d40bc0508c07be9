"""Compaction of a Trainer's model and of everything that refers to its parameters: other ranks and their DDP wrapper,
optimizers, averaged copies, masks of callbacks, compiled code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import prune

import engine
from engine.compaction import is_compacted
from engine.errors import PlanError, VerificationError
from engine.program import stored_tensors
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import MaskingCallback, masking_callbacks
from lightning_compress.selection.amounts import OF_STEPS, kept_units
from lightning_compress.trainer.averages import Average, averages
from lightning_compress.trainer.strategy import Job, Result, parallel

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def shrink(trainer: Trainer, pl_module: LightningModule, job: Job, alone: bool) -> Result:
    """Remove masked channels, verify the result, and update all dependents; on failure, restore everything.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule.
        job: the model to compact and the options.
        alone: whether the other ranks may be gone, so that this one must not communicate with them.

    Raises:
        EngineError: on all ranks, if the model cannot be compacted.
    """
    copies, strategy = averages(trainer.callbacks, pl_module, job.path), parallel(trainer)  # type: ignore[attr-defined]
    if copies and strategy.shards:
        raise PlanError("Averaged copies of a model with sharded parameters cannot be compacted.")
    model = pl_module.get_submodule(job.path)
    alike = all(_same(copy.module, model.get_submodule(copy.path)) for copy in copies)
    try:
        with strategy.shrunk(pl_module, job, alone) as (plan, certificate):
            if not plan.is_empty:
                together = _call if alone else strategy.together
                _update_dependents(trainer, pl_module, job, plan, [] if plan.folds and not alike else copies, together)
    except Exception:
        if job.training:
            strategy.follow()  # the parameters that were restored have new gradient accumulators, without DDP's hooks
        raise
    if copies and plan.folds and not alike:
        rank_zero_warn(
            "The averaged weights are not compacted: constants of removed channels were folded into the weights, but "
            "the averaged constants differ. Use `MaskConflictRepair`, so that no constants remain."
        )
    if not plan.is_empty:
        _forget_compiled_code()
    elif job.training and job.masks:
        _warn_of_masked_channels(model, job)
    return plan, certificate


_NOT_ZERO = "what its masked channels feed is not zero; mask their norms and biases too, with `MaskConflictRepair`"


def _warn_of_masked_channels(model: nn.Module, job: Job) -> None:
    """Warn that nothing was removed although whole channels are masked, and name the groups with the reasons."""
    groups = engine.dependency_groups(model, job.example, graph=job.graph)
    kept = kept_units(groups, job.masks)
    partly = [g for g in groups if kept[g.name].any() and not kept[g.name].all()]  # a masked layer keeps one
    masked = [f"{g.name} ({g.reason or _NOT_ZERO})" for g in partly]
    if masked:
        rank_zero_warn(f"Masked channels are not removed while training goes on: {'; '.join(masked[:3])}.{OF_STEPS}")


def _call(function: Callable[[], None]) -> None:
    function()


def _update_dependents(
    trainer: Trainer,
    pl_module: LightningModule,
    job: Job,
    plan: engine.Plan,
    copies: list[Average],
    together: Callable[[Callable[[], None]], None],
) -> None:
    """Update the averaged copies, the callbacks and the strategy after a compaction, all or none.

    Args:
        trainer, pl_module, job: as in `shrink`.
        plan: the plan that was applied to the model.
        copies: the averaged copies to compact.
        together: calls a function on all ranks, and raises on all if it fails on one.
    """
    model = pl_module.get_submodule(job.path)
    stored = stored_tensors(model)
    cuts = {stored[name]: cut for name, cut in plan.slices.items() if name in stored}
    with ExitStack() as undo:
        together(lambda: _shrink_averages(copies, plan, undo))
        for callback in _dependents(trainer, job.training):
            undo.callback(callback.snapshot())
            together(partial(_update, callback, trainer, pl_module, cuts, job.training))
        if job.training:
            parallel(trainer).follow()
        undo.pop_all()


def _dependents(trainer: Trainer, training: bool) -> list[CompressionCallback]:
    """Return the callbacks whose state follows the shapes; at the end of a fit only the masks of a checkpoint do."""
    callbacks = trainer.callbacks if training else masking_callbacks(trainer)  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, CompressionCallback)]


def _update(
    callback: CompressionCallback,
    trainer: Trainer,
    pl_module: LightningModule,
    cuts: Mapping[Tensor, engine.Slice],
    training: bool,
) -> None:
    if training:
        callback.after_compaction(trainer, pl_module, cuts)
    elif isinstance(callback, MaskingCallback):
        callback.end(pl_module, cuts)


_COMPACTED: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
"""Numbers of parameters before and after the compaction at the end of the last fit of each LightningModule."""


def remember_compaction(pl_module: LightningModule, before: int, after: int) -> None:
    """Remember the compaction at the end of a fit, for `warn_of_earlier_compaction`."""
    _COMPACTED[pl_module] = before, after


def warn_of_earlier_compaction(pl_module: LightningModule, resumes: bool) -> None:
    """Warn at the start of a schedule, unless it resumes, if an earlier fit compacted this LightningModule."""
    if not resumes and pl_module in _COMPACTED and is_compacted(pl_module):
        before, after = _COMPACTED[pl_module]
        rank_zero_warn(
            f"This `{type(pl_module).__name__}` was compacted at the end of an earlier fit ({before} -> {after} "
            "parameters; a `fast_dev_run` compacts, too). This fit prunes the small model further. To prune the "
            "original model, build the module anew; to continue the earlier fit, pass `ckpt_path=` of a checkpoint of "
            "`ModelCompaction(save_weights_only=False)`."
        )


def _shrink_averages(copies: list[Average], plan: engine.Plan, undo: ExitStack) -> None:
    """Apply a plan to averaged copies; ``undo`` restores those that were changed."""
    parts = [(copy.module, plan.within(f"{copy.path}." if copy.path else "")) for copy in copies]
    for change in [part.prepare(module) for module, part in parts]:
        undo.callback(change.rollback)
        change.commit()


def _same(one: nn.Module, other: nn.Module) -> bool:
    stored, other_stored = stored_tensors(one), stored_tensors(other)
    return all(
        name in other_stored and torch.equal(tensor.to(other_stored[name]), other_stored[name])
        for name, tensor in stored.items()
    )


def _forget_compiled_code() -> None:
    # Compiled code is specialised to the old sizes, and torch stops recompiling after a few more shapes. On a GPU,
    # `reset` imports the whole compiler, so it is called only if something was compiled.
    if "torch._dynamo.utils" in sys.modules and torch._dynamo.utils.counters["frames"]:
        torch.compiler.reset()


def check_no_buffers(model: nn.Module) -> None:
    """Check that `torch.nn.utils.prune` masks nothing, because its buffers cannot be compacted during training.

    Raises:
        VerificationError: naming the masked parameters.
    """
    masked_names = [f"{name}.{key}" for name, own in engine.read_masks(model).items() for key in own]
    if masked_names:
        raise VerificationError(
            f"{', '.join(masked_names[:3])} are masked by `torch.nn.utils.prune`, whose buffers cannot be compacted "
            "during training. Prune with `ChannelPruning`, or omit `when` to compact at the end of the fit."
        )


def make_permanent(model: nn.Module) -> Callable[[], None]:
    """Make the masks of `torch.nn.utils.prune` permanent, removing its parameters and buffers.

    Returns:
        A function that undoes it while the parameters have the same shapes.
    """
    originals: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for name, own in engine.read_masks(model).items():
        module = model.get_submodule(name)
        for parameter, mask in own.items():
            originals.append((module, parameter, mask, getattr(module, f"{parameter}_orig").detach().clone()))
            prune.remove(module, parameter)

    def undo() -> None:
        for module, parameter, mask, original in originals:
            if getattr(module, parameter).shape != original.shape:
                continue  # it is compacted already
            prune.custom_from_mask(module, parameter, mask)
            getattr(module, f"{parameter}_orig").data.copy_(original)

    return undo
