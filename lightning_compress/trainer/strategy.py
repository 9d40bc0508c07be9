"""Everything that depends on how parameters are spread over processes: one object per strategy.

Parameters are whole, in one process or copied to several (DDP), or each process holds a part of them (FSDP2, tensor
parallelism). The callbacks ask `parallel(trainer)` and know no strategy by its name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import engine
from engine.compaction import certify, entries, renew, restore_sharded
from engine.errors import EngineError, VerificationError
from engine.program import gathered_from
from engine.recording import evaluating
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.ranks import from_rank_zero, gathered
from lightning_compress.trainer.shards import Sharding, check_whole_units, shared_widths

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["Copied", "Job", "Sharded", "Whole", "check_strategy", "parallel", "shards"]

T = TypeVar("T")
Result = tuple[engine.Plan, engine.Certificate]


@dataclass(frozen=True)
class Job:
    """A compaction to carry out.

    Attributes:
        path: path of the model inside the LightningModule.
        example: an example input of the model, with data, the same on all ranks.
        masks: masks relative to the model; ``None`` reads zeros from the weights.
        graph: the model as it is, with its entries.
        confidence: number of random samples to verify with.
        training: whether training goes on; then what goes must be exact in train mode, too.
        reindex: whether layers may lose channels that others keep.
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
        """The `engine.ModelSpeedup` that plans it, and carries it out where parameters are whole."""
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
    """Every parameter is whole, in the one process that there is."""

    shards = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.trainer.world_size == 1

    def planning(self, pl_module: LightningModule) -> AbstractContextManager[None]:
        """Let the engine look at a LightningModule: inside, its parameters are whole, on every process."""
        return nullcontext()

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let a model run in eval mode, leaving no trace on it."""
        return evaluating(model)

    @property
    def processes(self) -> Any:
        """The processes that have to run a model together (`engine.compensate`); None where each has all of it."""
        return self if self.shards else None

    def at_rest(self, pl_module: LightningModule) -> None:
        """Let the LightningModule hold the parameters that the optimizers train."""

    def reader(self, model: nn.Module) -> Callable[[str], Tensor]:
        """A function from a name to the whole parameter; where it gathers, every process has to call it alike."""
        return model.get_parameter

    def decided(self, function: Callable[[], T]) -> T:
        """The result on rank 0 of a function that reads parameters, on all ranks."""
        return from_rank_zero(self.trainer, function)

    def widths(self, model: nn.Module, groups: Sequence[engine.Group]) -> Mapping[str, frozenset[int]]:
        """By group name, the numbers of units that may remain, where these are restricted."""
        return {}

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return tensor if self.alone else self.trainer.strategy.reduce(tensor, reduce_op="sum")  # type: ignore[return-value]

    def shrink(self, pl_module: LightningModule, job: Job, alone: bool) -> Result:
        """Remove masked channels from a model and its optimizers' state; on failure restore everything, on all ranks.

        Args:
            pl_module: the LightningModule.
            job: which model, and how.
            alone: whether the other ranks may be gone, so that nothing may be asked of them.

        Raises:
            EngineError: where it cannot be done, on all ranks alike.
        """
        speedup = job.speedup(pl_module)
        speedup.speedup_model(optimizer=self.trainer.optimizers or None, training=job.training)
        return speedup.plan, speedup.certificate

    def follow(self) -> None:
        """Let the strategy follow a model that was compacted while training goes on."""

    def state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint in one file; called on all ranks, though only rank 0 needs them."""
        return self.trainer.strategy.lightning_module_state_dict()

    def whole_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint whose optimizers' states can be written to one file."""
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
    """Every process holds a copy of every parameter."""

    def shrink(self, pl_module: LightningModule, job: Job, alone: bool) -> Result:
        """Rank 0 decides and verifies, the others do the same: rounding must not make two different models of one."""
        if alone or self.alone:
            return super().shrink(pl_module, job, alone)
        payload: tuple[Any, ...] = ()
        if self.trainer.is_global_zero:
            try:
                plan, certificate = super().shrink(pl_module, job, alone)
                payload = (plan.state_dict(), certificate.state_dict(), None)
            except EngineError as error:
                payload = (None, None, str(error))
        plan_state, certificate_state, failure = self.trainer.strategy.broadcast(payload)
        if failure is not None:
            raise VerificationError(failure)
        if not self.trainer.is_global_zero:
            model = pl_module.get_submodule(job.path)
            plan = engine.Plan.from_state_dict(plan_state)
            plan.apply(model, optimizer=self.trainer.optimizers or None)
            certificate = engine.Certificate.from_state_dict(certificate_state)
            if not plan.is_empty:
                certify(model, certificate.state_dict())
        return plan, certificate

    def follow(self) -> None:
        """Rebuild DDP's reducer: it has buckets of the old sizes, and hooks on the old accumulators."""
        strategy: Any = self.trainer.strategy
        if not isinstance(strategy.model, DistributedDataParallel):
            return
        strategy.model = strategy.lightning_module
        for parameter in self.trainer.lightning_module.parameters():
            renew(parameter)
        gc.collect()  # the old wrapper is part of reference cycles, and has to go before there is a new one
        strategy.configure_ddp()


class Sharded(Whole):
    """Every process holds a part of every parameter: nothing asks for more than one whole parameter at a time."""

    shards = True

    def planning(self, pl_module: LightningModule) -> AbstractContextManager[None]:
        """Let the engine look at a LightningModule: inside, its parameters are whole, and on the meta device."""
        return Sharding(pl_module).without_data()

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let a model run in eval mode, on all ranks together."""
        return Sharding(model).running()

    def at_rest(self, pl_module: LightningModule) -> None:
        """Let the LightningModule hold its shards, and not what the last forward pass gathered."""
        Sharding(pl_module).at_rest()

    def reader(self, model: nn.Module) -> Callable[[str], Tensor]:
        """A function that gathers a parameter by its name."""
        Sharding(model).at_rest()
        return gathered_from(model)

    def widths(self, model: nn.Module, groups: Sequence[engine.Group]) -> Mapping[str, frozenset[int]]:
        """The numbers that tensor parallelism can share evenly."""
        return shared_widths(groups, Sharding(model).parts())

    def decided(self, function: Callable[[], T]) -> T:
        """The result of a function on rank 0; it runs on all ranks, which gather parameters together."""
        return self.trainer.strategy.broadcast(self.together(function))  # type: ignore[return-value]

    def shrink(self, pl_module: LightningModule, job: Job, alone: bool) -> Result:
        """Rank 0 plans without data; all ranks gather and cut one parameter at a time, and verify together."""
        if alone and not self.alone:
            raise VerificationError(
                "The parameters are spread over processes that may be gone. Compact the last checkpoint instead "
                "(`lightning_compress.compact_checkpoint`)."
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
            return plan, certificate
        certificate = self._cut(sharding, plan, job, certificate)
        certify(engine.compactable(model), certificate.state_dict())
        return plan, certificate

    def _cut(
        self, sharding: Sharding, plan: engine.Plan, job: Job, certificate: engine.Certificate
    ) -> engine.Certificate:
        example, runs = job.example, min(job.confidence, 2)
        before = self.together(lambda: sharding.outputs(example, runs))
        change = self.together(lambda: sharding.prepared(plan, self.trainer.optimizers))
        try:
            self.together(change.commit, change.rollback, undoes_itself=True)
            verdict = self.together(lambda: sharding.compared(before, example, runs, certificate), change.rollback)
        finally:
            change.close()
        self._check_agreement(sharding.digest())
        return verdict

    def together(
        self, function: Callable[[], T], undo: Callable[[], None] | None = None, undoes_itself: bool = False
    ) -> T:
        """Return the result of a function; if it fails on one rank, undo it and raise an error on all."""
        try:
            result = function()
        except Exception as error:  # raised by `_check_all`, once no other rank waits for this one
            self._check_all(error, None if undoes_itself else undo)
            raise
        self._check_all(None, undo)
        return result

    def _check_all(self, failure: Exception | None, undo: Callable[[], None] | None = None) -> None:
        """Let all ranks fail if one did, instead of waiting for it."""
        messages = gathered(None if failure is None else str(failure))
        failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if failed and undo is not None:
            undo()
        if failure is not None:
            raise failure
        if failed:
            raise VerificationError(f"On rank {failed[0][0]}: {failed[0][1]}")

    def _check_agreement(self, digest: str) -> None:
        digests = gathered(digest)
        if len(set(digests)) > 1:
            raise MisconfigurationException(
                f"The ranks hold different models after a compaction ({', '.join(digests)}), so the fit cannot go on. "
                "Restart from the last checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """The weights, gathered on rank 0's CPU one after the other."""
        return Sharding(self.trainer.lightning_module).state_dict()

    def whole_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Optimizers' states under the numbers of their parameters, as one process has them."""
        if "optimizer_states" not in checkpoint:
            return checkpoint
        sharding = Sharding(self.trainer.lightning_module)
        states = [sharding.optimizer_state(optimizer) for optimizer in self.trainer.optimizers]
        return {**checkpoint, "optimizer_states": states}

    def restore_shapes(self, content: Mapping[str, Any] | None) -> None:
        """Bring the LightningModule and its optimizers to the shapes of a checkpoint that is about to be loaded.

        Args:
            content: what the checkpoint says of compactions, or None.

        Raises:
            CheckpointError: where the LightningModule went through other compactions.
        """
        wanted = {} if content is None else entries(content)
        restore_sharded(self.trainer.lightning_module, wanted, self.trainer.optimizers)

    def move(self, pl_module: LightningModule, device: torch.device) -> None:
        """Leave shards where they are: Lightning does not move them either."""


_KINDS: Mapping[str, type[Whole]] = {
    "SingleDeviceStrategy": Whole,
    "DDPStrategy": Copied,
    "ModelParallelStrategy": Sharded,
}
# Strategies that flatten parameters into buffers: a channel is then no slice of any one tensor.
_FLAT = ("FSDPStrategy", "DeepSpeedStrategy")


def _kind(trainer: Trainer) -> type[Whole] | None:
    names = [cls.__name__ for cls in type(trainer.strategy).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def parallel(trainer: Trainer) -> Whole:
    """Return the object for the way in which a Trainer's strategy spreads parameters.

    Raises:
        MisconfigurationException: for a strategy under which channels can be neither masked nor removed.
    """
    names, kind = [cls.__name__ for cls in type(trainer.strategy).__mro__], _kind(trainer)
    if kind is None or any(name in _FLAT for name in names):
        raise MisconfigurationException(
            f"Compression works on one device, with DDP, and under `ModelParallelStrategy`, not under `{names[0]}`, "
            "which does not keep parameters as tensors of their own. Choose one of these (`strategy='ddp'`, or "
            "`ModelParallelStrategy` with `fully_shard` in `configure_model`), or train without these callbacks there "
            "and compact the checkpoint offline (`lightning_compress.compact_checkpoint`)."
        )
    return kind(trainer)


def shards(trainer: Trainer) -> bool:
    """Whether a Trainer's strategy spreads parameters over processes in a way that is supported."""
    kind = _kind(trainer)
    return kind is not None and kind.shards


def check_strategy(trainer: Trainer, reason: str | None = None) -> None:
    """Refuse strategies under which channels can be neither masked nor removed, or which spread what must be whole.

    Args:
        trainer: the Trainer.
        reason: why parameters must be whole; None where they may be spread over processes.

    Raises:
        MisconfigurationException: saying which, and what works.
    """
    spread = parallel(trainer)
    # Only of late does FSDP2 find on the CPU what it asks of streams.
    if spread.shards and not hasattr(torch.cpu.Stream, "record_event") and trainer.strategy.root_device.type == "cpu":
        raise MisconfigurationException(
            f"torch {torch.__version__} cannot run FSDP2 on the CPU (`torch.cpu.Stream` has no `record_event`). Use "
            "GPUs or a newer torch, or train with `strategy='ddp'`."
        )
    if spread.shards and reason is not None:
        raise MisconfigurationException(
            f"{reason} That needs whole parameters, and `{type(trainer.strategy).__name__}` spreads them over "
            "processes. Leave it out there, or train with `strategy='ddp'`."
        )
