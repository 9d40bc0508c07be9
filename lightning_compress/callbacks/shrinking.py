"""Make the model that a Trainer holds smaller, with everything that holds on to it: the other ranks and their DDP
wrapper, optimizers, averaged copies, the masks of callbacks, compiled code."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import engine
from engine.compaction.compact import renew
from engine.compaction.history import certify
from engine.errors import EngineError, VerificationError
from engine.program.stored import stored_tensors
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.trainer.averages import Average, averages

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection.amounts import Masks

Result = tuple[engine.Plan, engine.Certificate]


def shrink(
    trainer: Trainer,
    pl_module: LightningModule,
    path: str,
    graph: engine.Graph,
    masks: Masks | None,
    *,
    confidence: int,
    training: bool,
    alone: bool,
    reindex: bool = False,
) -> Result:
    """Remove what is masked, verify it, and let everything follow; on failure all is as it was.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule.
        path: path of the model inside it.
        graph: the model as it is, with its entries.
        masks: masks relative to the model; ``None`` reads zeros from the weights.
        confidence: number of random samples to verify with.
        training: whether training goes on; then what goes must be exact in train mode, too.
        alone: whether the other ranks may be gone, so that nothing may be asked of them.
        reindex: whether layers may lose channels that others keep.

    Raises:
        EngineError: where it cannot be done, on all ranks alike.
    """
    model, callbacks = pl_module.get_submodule(path), trainer.callbacks  # type: ignore[attr-defined]
    copies = averages(callbacks, pl_module, path)
    example = graph.kwargs or graph.args
    speedup = functools.partial(
        engine.ModelSpeedup, model, example, masks, confidence=confidence, graph=graph, reindex=reindex
    )
    plan, certificate = _on_all_ranks(trainer, model, speedup, training, alone)
    if plan.is_empty:
        return plan, certificate
    _shrink_averages(copies, model, plan)
    if training:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        cuts = {parameters[name]: cut for name, cut in plan.slices.items() if name in parameters}
        for callback in callbacks:
            if isinstance(callback, CompressionCallback):
                callback.compacted(trainer, pl_module, cuts)
        _wrap_again(trainer)
    _forget_compiled_code()
    return plan, certificate


def _on_all_ranks(
    trainer: Trainer, model: nn.Module, make: Callable[[], engine.ModelSpeedup], training: bool, alone: bool
) -> Result:
    def speed_up() -> Result:
        speedup = make()
        speedup.speedup_model(optimizer=trainer.optimizers or None, training=training)
        return speedup.plan, speedup.certificate

    if alone or trainer.world_size == 1:
        return speed_up()
    # Rank 0 decides and verifies, the others do the same: rounding must not make two different models of one.
    payload: tuple[Any, ...] = ()
    if trainer.is_global_zero:
        try:
            plan, certificate = speed_up()
            payload = (plan.state_dict(), certificate.state_dict(), None)
        except EngineError as error:
            payload = (None, None, str(error))
    plan_state, certificate_state, failure = trainer.strategy.broadcast(payload)
    if failure is not None:
        raise VerificationError(failure)
    if not trainer.is_global_zero:
        plan = engine.Plan.from_state_dict(plan_state)
        plan.apply(model, optimizer=trainer.optimizers or None)
        certificate = engine.Certificate.from_state_dict(certificate_state)
        if not plan.is_empty:
            certify(model, certificate.state_dict())
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


def _wrap_again(trainer: Trainer) -> None:
    """Build DDP's reducer anew: it has buckets of the old sizes, and hooks on the parameters' old accumulators."""
    strategy: Any = trainer.strategy
    if not isinstance(strategy.model, DistributedDataParallel):
        return
    strategy.model = strategy.lightning_module
    for parameter in trainer.lightning_module.parameters():
        renew(parameter)
    gc.collect()  # the old wrapper lies in reference cycles, and is to be gone before there is a new one
    strategy.configure_ddp()


def _forget_compiled_code() -> None:
    # Compiled code is for the old sizes; after a few more shapes torch would no longer compile at all.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
