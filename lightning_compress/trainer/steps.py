"""The steps of a LightningModule as entries of the analysis, run on a real batch with a stub Trainer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

import engine
from lightning_compress.trainer.hooks import GradientHooks, Hooks, around
from lightning_compress.trainer.loaders import first_of_each, same_order
from lightning_compress.trainer.named_tensors import named_tensors
from lightning_compress.trainer.other_moments import OtherMoments, counters
from lightning_compress.trainer.packages import (
    COMBINED_LOADERS,
    LIGHTNING_MODULES,
    MisconfigurationException,
    isolate_rng,
    overrides,
    takes_argument,
)
from lightning_compress.trainer.quiet import quiet, stage_of
from lightning_compress.trainer.training_state import options_of
from lightning_compress.trainer.watched_counts import WatchedCount

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = [
    "EVALUATING",
    "TRAINING",
    "Step",
    "cannot_follow",
    "forget_steps",
    "step_entries",
    "warn_of_hooks",
]

TRAINING = "training_step"
EVALUATING = ("validation_step", "test_step", "predict_step")
_LOADERS = {
    TRAINING: "train_dataloader",
    "validation_step": "val_dataloader",
    "test_step": "test_dataloader",
    "predict_step": "predict_dataloader",
}
_CONTEXTS = {
    TRAINING: "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
_MOVING = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MOST_SAMPLES = 8
_OF_EVERY_MODULE = frozenset(name for kind in LIGHTNING_MODULES for name in vars(kind()))

Drawn = tuple[Any, ...]
"""The arguments of a step: a batch, its index, and that of its loader if there are several."""

_DRAWN: weakref.WeakKeyDictionary[nn.Module, dict[str, list[Drawn]]] = weakref.WeakKeyDictionary()


def forget_steps(pl_module: LightningModule) -> None:
    """Forget the batches that were drawn for a LightningModule, when another fit begins."""
    _DRAWN.pop(pl_module, None)


def step_entries(
    trainer: Trainer, pl_module: LightningModule, kinds: Sequence[str], ended: bool = False
) -> dict[str, engine.Entry]:
    """Return the steps that the Trainer runs, each on the first batch of its loader.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule.
        kinds: names of the steps; those that are not overridden, or have no loader, are omitted.
        ended: whether no further step follows in this fit, so that what a step leaves behind does not matter.

    Returns:
        Entries for `engine.trace`, by the name of the step, with the index of the loader if there are several.
    """
    drawn = _DRAWN.setdefault(pl_module, {})
    entries: dict[str, engine.Entry] = {}
    for kind in kinds:
        if not overrides(pl_module, kind):
            continue
        if kind not in drawn:
            drawn[kind] = _draw(trainer, pl_module, kind)
        for number, arguments in enumerate(drawn[kind]):
            name = kind if len(drawn[kind]) == 1 else f"{kind} ({number})"
            placed = apply_to_collection(arguments, Tensor, lambda t: t.to(pl_module.device))
            step = Step(pl_module, kind)
            after = None if ended else step.left
            if kind == TRAINING:
                after = GradientHooks(pl_module, step.end, step.moment, step.hooks, step.options, ended)
            present = {"epoch": trainer.current_epoch, "step": trainer.global_step}
            entries[name] = engine.Entry(
                step, tuple(placed), training=kind == TRAINING, name=name, fixed=_OF_EVERY_MODULE,
                others=OtherMoments(pl_module, kind, tuple(placed), present, step.hooks.callbacks, step.noted),
                after=after,
            )  # fmt: skip
    return entries


# ---------------------------------------------------------------- batches


def _draw(trainer: Trainer, pl_module: LightningModule, kind: str) -> list[Drawn]:
    """Return the first batch of each loader, as the step receives it; random states and loaders are preserved."""
    with isolate_rng():
        loaders = _loaders(trainer, pl_module, kind)
    arguments: list[Drawn] = []
    for number, loader in enumerate(loaders):
        with isolate_rng(), same_order(loader):
            batch = first_of_each(loader)
            if batch is None:
                continue
            batch = trainer.precision_plugin.convert_input(_few(batch))
            if not _moves_by_itself(trainer, pl_module):
                batch = _moved(pl_module, batch, number)
        arguments.append((batch, 0, number) if len(loaders) > 1 else (batch, 0))
    return arguments


def _moves_by_itself(trainer: Any, pl_module: LightningModule) -> bool:
    """Whether the hooks that move a batch to the device read parameters, so that they are part of the step."""
    owners = [owner for owner in (pl_module, trainer.datamodule) if owner is not None]
    hooks = [(getattr(type(owner), name), owner) for owner in owners for name in _MOVING if _is_own(owner, name)]
    return any(named_tensors(hook, owner, pl_module) for hook, owner in hooks)


def _moved(pl_module: Any, batch: Any, number: int) -> Any:
    # Not by Lightning's own methods, which export methods of the LightningModule call with other arguments.
    trainer = pl_module._trainer
    owner_of = trainer._data_connector._datahook_selector.get_instance
    for name in _MOVING:
        device = (trainer.strategy.root_device,) if name == "transfer_batch_to_device" else ()
        batch = getattr(owner_of(name), name)(batch, *device, number)
    return batch


def _loaders(trainer: Trainer, pl_module: LightningModule, kind: str) -> list[Any]:
    name, have = _LOADERS[kind], None
    if kind == TRAINING:
        have = trainer.train_dataloader
        return [] if have is None else [have]
    if kind == "validation_step":
        source = trainer.fit_loop.epoch_loop.val_loop._data_source
        if trainer.limit_val_batches and source.instance is not None and source.is_defined():
            have = source.dataloader() if trainer.val_dataloaders is None else trainer.val_dataloaders
    else:
        owner = trainer.datamodule if _is_own(trainer.datamodule, name) else pl_module  # type: ignore[attr-defined]
        have = _later_loader(owner, name) if _is_own(owner, name) else None
    return _parts_of(have)


def _later_loader(owner: Any, name: str) -> Any:
    """Return the loader of a stage after the fit; None if it needs its own `setup`, as in data modules."""
    try:
        return getattr(owner, name)()
    except Exception as error:  # of the user's code, which the Trainer runs after `setup` alone
        rank_zero_warn(
            f"`{type(owner).__name__}.{name}` cannot be called during the fit ({type(error).__name__}: {error}), so "
            "its step is not recorded: what the step reads besides the model's outputs is not analysed."
        )
        return None


def _parts_of(loaders: Any) -> list[Any]:
    """Return the loaders over which an evaluation iterates one after the other."""
    if loaders is None:
        return []
    if isinstance(loaders, COMBINED_LOADERS):
        if loaders._mode != "sequential":  # a batch of each at a time
            return [loaders.iterables]
        loaders = loaders.iterables
    parts = loaders.values() if isinstance(loaders, Mapping) else loaders
    return [*parts] if isinstance(loaders, (list, tuple, Mapping)) else [loaders]


def _is_own(source: Any, name: str) -> bool:
    """Whether a LightningModule or a data module has a method that is not Lightning's."""
    method = getattr(type(source), name, None)
    return method is not None and not method.__module__.startswith(("pytorch_lightning.", "lightning."))


def _few(batch: Any) -> Any:
    """Return the first samples of a batch, which are enough to verify with."""
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.extend(tensor.shape[:1]))
    size = max(sizes, default=0)
    return apply_to_collection(batch, Tensor, lambda t: t[:_MOST_SAMPLES] if t.ndim and t.shape[0] == size else t)


# ---------------------------------------------------------------- a step


class Step:
    """A step with the hooks around its batch, as if the batch were an epoch; its calls of the Trainer do nothing.

    Args:
        pl_module: the LightningModule; it is attached to a Trainer.
        kind: name of the step.

    Attributes:
        hooks: the hooks around it.
        noted: numbers with which code compared the indices of batch, epoch and step.
    """

    def __init__(self, pl_module: LightningModule, kind: str) -> None:
        self._module, self._kind = pl_module, kind
        self._before, self._behind = around(kind)
        if pl_module._current_fx_name != "on_train_start":  # then the LightningModule's own has run
            self._before = tuple(name for name in self._before if name != "on_train_start")
        training = (*GradientHooks.names(), "on_before_zero_grad", "on_before_backward") if kind == TRAINING else ()
        self.hooks = Hooks(pl_module, (*self._before, *self._behind, *training))
        self._callbacks = self.hooks.callbacks  # where the engine looks for modules
        self._last: tuple[Any, ...] = ()
        self._counters: Mapping[str, Any] = {}
        self._options: Mapping[str, Any] = {}
        self.noted: dict[str, set[int]] = {"batch": set(), "epoch": set(), "step": set()}
        self.__name__ = kind

    def __call__(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None, **moment: Any) -> Any:
        """Run the step; return everything that it returns, logs and differentiates.

        Args:
            batch, batch_idx: arguments of the step.
            dataloader_idx: argument of the step if there are several loaders.
            moment: the Trainer's counters in this call.
        """
        module, kind = self._module, self._kind
        trainer: Any = module._trainer
        moment = {"epoch": trainer.current_epoch, "step": trainer.global_step, **moment}
        of_loader = () if dataloader_idx is None else (dataloader_idx,)
        arguments: tuple[Any, ...] = (batch, WatchedCount(batch_idx, self.noted["batch"]), *of_loader)
        counts = {name: WatchedCount(n, self.noted[name]) if name in self.noted else n for name, n in moment.items()}
        self._counters = {**counters(counts), **stage_of(kind)}
        self.hooks.begin()
        read: list[Tensor] = []
        if _moves_by_itself(trainer, module):
            arguments = (_moved(module, arguments[0], *arguments[2:] or (0,)), *arguments[1:])
        with quiet(module, trainer, self._counters) as record, getattr(trainer.precision_plugin, _CONTEXTS[kind])():
            for name in self._before:
                read += self.hooks.run(name, *(arguments if "_batch_" in name else ()))
            out = getattr(module, kind)(*self._fitting(arguments))
            if kind == TRAINING and module.automatic_optimization:
                read += self._optimize(out, arguments, record.optimizers[:1])
            left = out if isinstance(out, (Tensor, dict)) or out is None else {}
            self._last = (left, *arguments)
            if not torch.is_grad_enabled():
                read += self.end()
            self._options = options_of(record.optimizers)
        return [out, [*record.values, *read]]

    def _optimize(self, out: Any, arguments: Sequence[Any], optimizers: Sequence[Any]) -> list[Tensor]:
        """Run what comes between a training step and the end of its batch; with gradients, what comes before these."""
        module, loss = self._module, out.get("loss") if isinstance(out, Mapping) else out
        read = [*self.hooks.run("on_before_zero_grad", *optimizers)]
        for optimizer in optimizers if overrides(module, "optimizer_zero_grad") else ():
            module.optimizer_zero_grad(module.current_epoch, arguments[1], optimizer)
        if loss is not None:
            read += self.hooks.run("on_before_backward", loss)
        if overrides(module, "backward") and loss is not None:
            module.backward(loss)
        for optimizer in () if torch.is_grad_enabled() else optimizers:
            if overrides(module, "optimizer_step"):
                module.optimizer_step(module.current_epoch, arguments[1], optimizer, lambda: loss)
            else:  # it may have hooks
                optimizer.step(lambda: loss)
        return read

    def moment(self) -> Mapping[str, Any]:
        """Return the Trainer's counters in the last call."""
        return self._counters

    def options(self) -> Mapping[str, Any]:
        """Return the options of the optimizers at the end of the last call."""
        return self._options

    def left(self) -> dict[str, Any]:
        """Return the values that the last call left behind: options of optimizers, and attributes."""
        return {**self._options, **self.hooks.left()}

    def end(self) -> list[Tensor]:
        """Run the hooks at the end of the batch and the epoch; with gradients, once these are computed.

        Returns:
            The tensors that count as read.
        """
        runs = [self.hooks.run(name, *(self._last if "_batch_" in name else ())) for name in self._behind]
        if self._kind == TRAINING and overrides(self._module, "lr_scheduler_step"):
            runs += [self.hooks.run("lr_scheduler_step", *arguments) for arguments in self._schedulers()]
        return [tensor for read in runs for tensor in read]

    def _schedulers(self) -> Iterator[tuple[Any, Any]]:
        """Yield the stubs for the Trainer's schedulers, each with the metric that it receives."""
        trainer: Any = self._module._trainer
        have: Any = self._module.lr_schedulers()
        some = have if isinstance(have, list) else [] if have is None else [have]
        for scheduler, config in zip(some, trainer.lr_scheduler_configs, strict=True):
            yield scheduler, 0.5 if config.reduce_on_plateau else None

    def _fitting(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments that the step accepts: without the batch index if it has no such parameter."""
        takes = takes_argument(getattr(self._module, self._kind), "batch_idx", min_args=2)
        return arguments if takes else (arguments[0], *arguments[2:])


def warn_of_hooks(entries: Mapping[str, engine.Entry]) -> None:
    """Warn of hooks around recorded steps that raised an error.

    Args:
        entries: entries of the steps.

    Example:
        >>> warn_of_hooks({})
    """
    for entry in entries.values():
        for name, error in entry.call.hooks.failures.items() if isinstance(entry.call, Step) else ():
            rank_zero_warn(
                f"{name} cannot be traced because it fails after a single batch; everything that its code names keeps "
                f"its channels. {type(error).__name__}: {error}"
            )


def cannot_follow(error: Exception) -> MisconfigurationException:
    """Return the error for a step that cannot be recorded, with advice.

    Example:
        >>> "validation_step" in str(cannot_follow(ValueError("The entry 'validation_step' does not run.")))
        True
    """
    return MisconfigurationException(
        f"A step of this LightningModule cannot be traced, so a compaction could break it: {error} Fix the step, or "
        "pass `ModelCompaction(steps=False)`, which only preserves the model's forward."
    )
