"""Make the model that a Trainer holds smaller, with everything that holds on to it: the other ranks and their DDP
wrapper, optimizers, averaged copies, the masks of callbacks, compiled code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.utils import prune

import engine
from engine.errors import PlanError, VerificationError
from engine.program import stored_tensors
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.trainer.averages import Average, averages
from lightning_compress.trainer.strategy import Job, Result, parallel

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def shrink(trainer: Trainer, pl_module: LightningModule, job: Job, alone: bool) -> Result:
    """Remove masked channels, verify the result, and let everything follow; on failure everything is restored.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule.
        job: which model, and how.
        alone: whether the other ranks may be gone, so that nothing may be asked of them.

    Raises:
        EngineError: where it cannot be done, on all ranks alike.
    """
    model, callbacks = pl_module.get_submodule(job.path), trainer.callbacks  # type: ignore[attr-defined]
    copies, spread = averages(callbacks, pl_module, job.path), parallel(trainer)
    if copies and spread.shards:
        raise PlanError("Averaged copies of a model whose parameters are sharded cannot follow a compaction.")
    plan, certificate = spread.shrink(pl_module, job, alone)
    if plan.is_empty:
        return plan, certificate
    _shrink_averages(copies, model, plan)
    if job.training:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        cuts = {parameters[name]: cut for name, cut in plan.slices.items() if name in parameters}
        for callback in callbacks:
            if isinstance(callback, CompressionCallback):
                callback.compacted(trainer, pl_module, cuts)
        spread.follow()
    _forget_compiled_code()
    return plan, certificate


def _shrink_averages(copies: list[Average], model: nn.Module, plan: engine.Plan) -> None:
    """Apply a plan to averaged copies: all of them, or none."""
    parts = [(copy.module, plan.within(f"{copy.path}." if copy.path else "")) for copy in copies]
    if plan.folds and not all(_same(copy.module, model.get_submodule(copy.path)) for copy in copies):
        rank_zero_warn(
            "The averaged weights are not compacted: constants of removed channels were folded into the weights, and "
            "theirs differ. Use `MaskConflictRepair`, so that no constants remain."
        )
        return
    for change in [part.prepare(module) for module, part in parts]:
        change.commit()


def _same(one: nn.Module, other: nn.Module) -> bool:
    stored, other_stored = stored_tensors(one), stored_tensors(other)
    return all(
        name in other_stored and torch.equal(tensor.to(other_stored[name]), other_stored[name])
        for name, tensor in stored.items()
    )


def _forget_compiled_code() -> None:
    # Compiled code is for the old sizes; after a few more shapes torch would no longer compile at all.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def check_no_buffers(model: nn.Module) -> None:
    """Refuse masks of `torch.nn.utils.prune` while training goes on.

    Raises:
        VerificationError: naming the masked parameters.
    """
    masked_names = [f"{name}.{key}" for name, own in engine.read_masks(model).items() for key in own]
    if masked_names:
        raise VerificationError(
            f"{', '.join(masked_names[:3])} are masked by `torch.nn.utils.prune`, whose buffers cannot follow a "
            "compaction while training goes on. Prune with `ChannelPruning`, or leave `when` out: then they are "
            "removed at the end of the fit."
        )


def make_permanent(model: nn.Module) -> None:
    """Remove the parameters and buffers of `torch.nn.utils.prune`; the masked weights stay."""
    for name, own in engine.read_masks(model).items():
        for parameter in own:
            prune.remove(model.get_submodule(name), parameter.removesuffix("_orig"))
