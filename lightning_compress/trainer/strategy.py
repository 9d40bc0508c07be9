"""Adapters to the Trainer's strategies: everything that depends on how parameters are distributed over processes.

Parameters live in one process, are replicated (DDP), or are sharded (FSDP2, tensor parallelism). Callbacks use
`parallel(trainer)` and do not depend on particular strategies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import engine
from engine.compaction import entries, renew, restore_sharded, store_certificate
from engine.errors import VerificationError
from engine.program import gathered_from
from engine.running import evaluating
from lightning_compress.trainer.optimizer_states import narrowed_along
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.ranks import from_rank_zero, gathered, together
from lightning_compress.trainer.shards import Sharding, check_whole_units, shared_widths

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["Copied", "Job", "Sharded", "Whole", "check_strategy", "parallel", "shards"]

T = TypeVar("T")
Result = tuple[engine.Plan, engine.Certificate]


@dataclass(frozen=True)
class Job:
    """A requested compaction.

    Attributes:
        path: path of the model inside the LightningModule.
        example: an example input of the model, with data, the same on all ranks.
        masks: masks relative to the model; ``None`` reads zeros from the weights.
        graph: graph of the current model, with its entries.
        confidence: number of random samples to verify with.
        training: whether training continues, so that the compaction must be exact in train mode, too.
        reindex: whether layers may lose channels that coupled layers keep.
        plain_norms: which norms become ordinary ones, see `engine.ModelSpeedup`.
    """

    path: str
    example: Any
    masks: Any
    graph: engine.Graph
    confidence: int
    training: bool
    reindex: bool = False
    plain_norms: bool | str = False

    def speedup(self, pl_module: LightningModule, confidence: int | None = None) -> engine.ModelSpeedup:
        """Build the `engine.ModelSpeedup` that plans the compaction and, unless parameters are sharded, applies it."""
        return engine.ModelSpeedup(
            pl_module.get_submodule(self.path),
            self.graph.kwargs or self.graph.args,
            self.masks,
            confidence=self.confidence if confidence is None else confidence,
            graph=self.graph,
            reindex=self.reindex,
            plain_norms=self.plain_norms,
        )


class Whole:
    """A single process."""

    shards = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def alone(self) -> bool:
        """Whether there is only one process."""
        return self.trainer.world_size == 1

    def planning(self, pl_module: LightningModule) -> AbstractContextManager[None]:
        """Replace shards by whole parameters inside the context, so that the engine can analyse the LightningModule."""
        return nullcontext()

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Run a model in eval mode inside the context, and restore its state afterwards."""
        return evaluating(model)

    @property
    def processes(self) -> Any:
        """The processes that have to run a model together, for `engine.compensate`; None unless it is sharded."""
        return self if self.shards else None

    def at_rest(self, pl_module: LightningModule) -> None:
        """Reshard the LightningModule, so that it holds the parameters that the optimizers train."""

    def reader(self, model: nn.Module) -> Callable[[str], Tensor]:
        """Return a function from a name to the whole parameter; calling it may be a collective operation."""
        return model.get_parameter

    def decided(self, function: Callable[[], T]) -> T:
        """Return, on all ranks, the result on rank 0 of a function that reads parameters."""
        return from_rank_zero(self.trainer, function)

    def widths(self, model: nn.Module, groups: Sequence[engine.Group]) -> Mapping[str, frozenset[int]]:
        """Return the allowed numbers of units by group name; groups without a restriction are omitted."""
        return {}

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        return tensor if self.alone else self.trainer.strategy.reduce(tensor, reduce_op="sum")  # type: ignore[return-value]

    @contextmanager
    def shrunk(self, pl_module: LightningModule, job: Job, alone: bool) -> Iterator[Result]:
        """Remove masked channels from a model and its optimizers' state; restore all if that or the body fails.

        The body has to fail on all ranks or on none, see `together`.

        Args:
            pl_module: the LightningModule.
            job: the requested compaction.
            alone: whether the other ranks may be gone, so that this one must not communicate with them.

        Raises:
            EngineError: on all ranks, if the model cannot be compacted.
        """
        speedup = job.speedup(pl_module)
        with (
            narrowed_along(self.trainer.optimizers, job.training) as optimizers,
            speedup.compacting(optimizers or None, training=job.training),
        ):
            yield speedup.plan, speedup.certificate

    def together(
        self, function: Callable[[], T], undo: Callable[[], None] | None = None, undoes_itself: bool = False
    ) -> T:
        """Call a function on all ranks; if it fails on one, undo it and raise on all."""
        return together(function, undo, undoes_itself=undoes_itself, failure_elsewhere=VerificationError)

    def follow(self) -> None:
        """Update the Trainer's strategy after a compaction during training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint in one file, on rank 0; called on all ranks."""
        return self.trainer.strategy.lightning_module_state_dict()

    def whole_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with unsharded optimizer states."""
        return checkpoint

    def move(self, pl_module: LightningModule, device: torch.device) -> None:
        """Move a LightningModule and its optimizers' state to a device."""
        pl_module.to(device)
        for optimizer in self.trainer.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:
                        state[key] = value.to(device)


class Copied(Whole):
    """Parameters are replicated (DDP)."""

    @contextmanager
    def shrunk(self, pl_module: LightningModule, job: Job, alone: bool) -> Iterator[Result]:
        """Compact on rank 0 and apply its plan on the other ranks, so that rounding cannot make the ranks diverge."""
        with ExitStack() as changes:  # a failure reaches the contexts entered so far, which undo their changes
            if alone or self.alone:
                yield changes.enter_context(super().shrunk(pl_module, job, alone))
                return
            own: list[Result] = []  # on rank 0

            def compacted() -> tuple[Any, Any]:
                own.append(changes.enter_context(super(Copied, self).shrunk(pl_module, job, alone)))
                return own[0][0].state_dict(), own[0][1].state_dict()

            states = from_rank_zero(self.trainer, compacted, VerificationError)
            other = self._applied(pl_module.get_submodule(job.path), job, *states)
            yield self.together(lambda: own[0] if own else changes.enter_context(other))

    @contextmanager
    def _applied(self, model: nn.Module, job: Job, plan_state: Any, certificate_state: Any) -> Iterator[Result]:
        """Apply the plan of rank 0, and undo that if the body fails."""
        plan = engine.Plan.from_state_dict(plan_state)
        certificate = engine.Certificate.from_state_dict(certificate_state)
        with narrowed_along(self.trainer.optimizers, job.training) as optimizers:
            change = plan.prepare(model, optimizer=optimizers or None)
            try:
                change.commit()
                if not plan.is_empty:
                    store_certificate(model, certificate.state_dict())
                yield plan, certificate
            except BaseException:
                change.rollback()
                raise

    def follow(self) -> None:
        """Rebuild DDP's reducer, whose buckets have the old sizes and whose hooks are on the old accumulators."""
        strategy: Any = self.trainer.strategy
        if not isinstance(strategy.model, DistributedDataParallel):
            return
        strategy.model = strategy.lightning_module
        for parameter in self.trainer.lightning_module.parameters():
            renew(parameter)
        gc.collect()  # free the old wrapper, which is part of reference cycles, before creating a new one
        strategy.configure_ddp()


class Sharded(Whole):
    """Parameters are sharded; at most one is gathered at a time."""

    shards = True

    def planning(self, pl_module: LightningModule) -> AbstractContextManager[None]:
        """Replace shards by whole parameters on the meta device inside the context."""
        return Sharding(pl_module).without_data()

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Run a model in eval mode inside the context, on all ranks together."""
        return Sharding(model).running()

    def at_rest(self, pl_module: LightningModule) -> None:
        """Reshard the parameters that the last forward pass gathered."""
        Sharding(pl_module).at_rest()

    def reader(self, model: nn.Module) -> Callable[[str], Tensor]:
        """Return a function that gathers a parameter by its name."""
        Sharding(model).at_rest()
        return gathered_from(model)

    def widths(self, model: nn.Module, groups: Sequence[engine.Group]) -> Mapping[str, frozenset[int]]:
        """Return the numbers of units that tensor parallelism can split evenly, by group name."""
        return shared_widths(groups, Sharding(model).parts())

    def decided(self, function: Callable[[], T]) -> T:
        """Call a function on all ranks, which gather parameters together, and return the result of rank 0."""
        return self.trainer.strategy.broadcast(self.together(function))  # type: ignore[return-value]

    @contextmanager
    def shrunk(self, pl_module: LightningModule, job: Job, alone: bool) -> Iterator[Result]:
        """Plan on rank 0 without data, then gather and slice one parameter at a time and verify on all ranks."""
        if alone and not self.alone:
            raise VerificationError(
                "The parameters are sharded over processes that may be gone. Compact the last checkpoint instead, with "
                "`lightning_compress.compact_checkpoint`."
            )

        model = pl_module.get_submodule(job.path)
        sharding = Sharding(model)
        splits = sharding.parts()

        def planned() -> tuple[Any, bool]:
            with self.planning(pl_module):
                speedup = job.speedup(pl_module, confidence=0)
                if splits:
                    groups = engine.dependency_groups(model, job.graph.kwargs or job.graph.args, graph=job.graph)
                    check_whole_units(speedup.plan, groups, splits)
                return speedup.plan.state_dict(), speedup.check_training(job.training)

        state, in_train = from_rank_zero(self.trainer, planned)
        plan = engine.Plan.from_state_dict(state)
        certificate = engine.Certificate(exact_in_train=in_train, notes=plan.notes)
        if plan.is_empty:
            yield plan, certificate
            return
        with self._cut(sharding, plan, job, certificate) as verdict:
            store_certificate(engine.compactable(model), verdict.state_dict())
            yield plan, verdict

    @contextmanager
    def _cut(
        self, sharding: Sharding, plan: engine.Plan, job: Job, certificate: engine.Certificate
    ) -> Iterator[engine.Certificate]:
        """Cut and verify the parameters, and restore them if the body fails."""
        example, runs = job.example, min(job.confidence, 2)
        before = self.together(lambda: sharding.outputs(example, runs))
        change = self.together(lambda: sharding.prepared(plan, self.trainer.optimizers))
        try:
            self.together(change.commit, change.rollback, undoes_itself=True)
            verdict = self.together(lambda: sharding.compared(before, example, runs, certificate), change.rollback)
            self._check_agreement(sharding.digest())
            try:
                yield verdict
            except BaseException:
                change.rollback()
                raise
        finally:
            change.close()

    def _check_agreement(self, digest: str) -> None:
        digests = gathered(digest)
        if len(set(digests)) > 1:
            raise MisconfigurationException(
                f"The ranks hold different models after a compaction ({', '.join(digests)}), so the fit cannot "
                "continue. Restart from the last checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, gathered on the CPU of rank 0 one by one."""
        return Sharding(self.trainer.lightning_module).state_dict()

    def whole_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with gathered optimizer states, under parameter indices as in a single process."""
        if "optimizer_states" not in checkpoint:
            return checkpoint
        sharding = Sharding(self.trainer.lightning_module)
        states = [sharding.optimizer_state(optimizer) for optimizer in self.trainer.optimizers]
        return {**checkpoint, "optimizer_states": states}

    def restore_shapes(self, content: Mapping[str, Any] | None) -> None:
        """Reshape the LightningModule and its optimizers to a checkpoint that is about to be loaded.

        Args:
            content: the checkpoint's record of compactions, or None.

        Raises:
            CheckpointError: if the LightningModule went through other compactions.
        """
        wanted = {} if content is None else entries(content)
        restore_sharded(self.trainer.lightning_module, wanted, self.trainer.optimizers)

    def move(self, pl_module: LightningModule, device: torch.device) -> None:
        """Do nothing, because Lightning does not move shards either."""


_KINDS: Mapping[str, type[Whole]] = {
    "SingleDeviceStrategy": Whole,
    "DDPStrategy": Copied,
    "ModelParallelStrategy": Sharded,
}
# Strategies that flatten parameters into buffers, in which a channel is not a slice of a tensor.
_FLAT = ("FSDPStrategy", "DeepSpeedStrategy")


def _kind(trainer: Trainer) -> type[Whole] | None:
    names = [cls.__name__ for cls in type(trainer.strategy).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def parallel(trainer: Trainer) -> Whole:
    """Return the adapter for a Trainer's strategy.

    Raises:
        MisconfigurationException: if channels can be neither masked nor removed under the strategy.
    """
    names, kind = [cls.__name__ for cls in type(trainer.strategy).__mro__], _kind(trainer)
    if kind is None or any(name in _FLAT for name in names):
        raise MisconfigurationException(
            f"Compression supports single devices, DDP and `ModelParallelStrategy`, not `{names[0]}`, which does not "
            "keep parameters as separate tensors. Use `strategy='ddp'`, or `ModelParallelStrategy` with `fully_shard` "
            "in `configure_model`, or train without these callbacks and compact the checkpoint offline with "
            "`lightning_compress.compact_checkpoint`."
        )
    return kind(trainer)


def shards(trainer: Trainer) -> bool:
    """Whether a Trainer's strategy shards parameters in a supported way."""
    kind = _kind(trainer)
    return kind is not None and kind.shards


def check_strategy(trainer: Trainer, reason: str | None = None) -> None:
    """Check that the Trainer's strategy is supported.

    Args:
        trainer: the Trainer.
        reason: why the callback does not support sharded parameters; None if it does.

    Raises:
        MisconfigurationException: if it is not.
    """
    strategy = parallel(trainer)
    # FSDP2 uses methods of streams that older versions of torch lack on the CPU.
    if strategy.shards and not hasattr(torch.cpu.Stream, "record_event") and trainer.strategy.root_device.type == "cpu":
        raise MisconfigurationException(
            f"torch {torch.__version__} cannot run FSDP2 on the CPU (`torch.cpu.Stream` has no `record_event`). Use "
            "GPUs or a newer torch, or train with `strategy='ddp'`."
        )
    if strategy.shards and reason is not None:
        raise MisconfigurationException(
            f"{reason} This needs unsharded parameters, but `{type(trainer.strategy).__name__}` shards them. Omit it, "
            "or train with `strategy='ddp'`."
        )
