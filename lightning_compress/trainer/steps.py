"""The steps of a LightningModule as entries of the analysis: run on a real batch, with a Trainer that does nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

import engine
from lightning_compress.trainer.hooks import GradientHooks
from lightning_compress.trainer.moments import counters, other_moments
from lightning_compress.trainer.packages import (
    LIGHTNING_MODULES,
    MisconfigurationException,
    isolate_rng,
    overrides,
    takes_argument,
)
from lightning_compress.trainer.quiet import quiet

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["EVALUATING", "TRAINING", "Step", "cannot_follow", "forget_steps", "same_order", "step_entries"]

TRAINING = "training_step"
EVALUATING = ("validation_step", "test_step", "predict_step")
_LOADERS = {
    TRAINING: "train_dataloader",
    "validation_step": "val_dataloader",
    "test_step": "test_dataloader",
    "predict_step": "predict_dataloader",
}
_AROUND = {
    TRAINING: ("on_train_batch_start", "on_before_zero_grad", "on_train_batch_end"),
    "validation_step": ("on_validation_batch_start", None, "on_validation_batch_end"),
    "test_step": ("on_test_batch_start", None, "on_test_batch_end"),
    "predict_step": ("on_predict_batch_start", None, "on_predict_batch_end"),
}
_CONTEXTS = {
    TRAINING: "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}

_EPOCH = ("on_train_epoch_start", "on_train_epoch_end")
_OF_EVERY_MODULE = frozenset(name for kind in LIGHTNING_MODULES for name in vars(kind()))

Drawn = tuple[Any, ...]
"""The arguments of a step: a batch, its number, and that of its loader where there are several."""

_DRAWN: weakref.WeakKeyDictionary[nn.Module, dict[str, list[Drawn]]] = weakref.WeakKeyDictionary()


def forget_steps(pl_module: LightningModule) -> None:
    """Forget the batches that were drawn for a LightningModule, when another fit begins."""
    _DRAWN.pop(pl_module, None)


def step_entries(
    trainer: Trainer, pl_module: LightningModule, kinds: Sequence[str], epochs: bool = True
) -> dict[str, engine.Entry]:
    """The steps that the Trainer runs, each on the first batch of its loader.

    Args:
        trainer: fits the LightningModule.
        pl_module: the LightningModule.
        kinds: names of the steps; those that it does not override, or that have no loader, are left out.
        epochs: whether the hooks of an epoch run around the training step.

    Returns:
        Entries for `engine.trace`, by the name of the step, and of the loader where there are several.
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
            step = Step(pl_module, kind, epochs)
            hooks = GradientHooks(pl_module, step.end, step.moment) if kind == TRAINING else None
            callbacks = [] if hooks is None else hooks.callbacks
            moment = trainer.current_epoch, trainer.global_step
            entries[name] = engine.Entry(
                step, tuple(placed), training=kind == TRAINING, name=name, fixed=_OF_EVERY_MODULE,
                others=other_moments(pl_module, kind, tuple(placed), *moment, callbacks),
                after=hooks if hooks else None,
            )  # fmt: skip
    return entries


# ---------------------------------------------------------------- batches


def _draw(trainer: Trainer, pl_module: LightningModule, kind: str) -> list[Drawn]:
    """The first batch of each loader, as the step gets it; random states and loaders stay as they are."""
    with isolate_rng():
        loaders = _loaders(trainer, pl_module, kind)
    arguments: list[Drawn] = []
    for number, loader in enumerate(loaders):
        with isolate_rng(), same_order(loader):
            batch = _first(loader)
            if batch is None:
                continue
            batch = trainer.precision_plugin.convert_input(_few(batch))
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=number)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=number)
        arguments.append((batch, 0, number) if len(loaders) > 1 else (batch, 0))
    return arguments


def _loaders(trainer: Trainer, pl_module: LightningModule, kind: str) -> list[Any]:
    name, have = _LOADERS[kind], None
    if kind == TRAINING:
        have = trainer.train_dataloader
        return [] if have is None else [have]
    if kind == "validation_step":
        source = trainer.fit_loop.epoch_loop.val_loop._data_source
        if trainer.limit_val_batches and source.instance is not None and source.is_defined():
            have = trainer.val_dataloaders or source.dataloader()
    else:
        owner = trainer.datamodule if _has_loader(trainer.datamodule, name) else pl_module  # type: ignore[attr-defined]
        have = getattr(owner, name)() if _has_loader(owner, name) else None
    if have is None:
        return []
    return list(have) if isinstance(have, (list, tuple)) else [have]


def _has_loader(source: Any, name: str) -> bool:
    method = getattr(type(source), name, None)
    return method is not None and not method.__module__.startswith(("pytorch_lightning.", "lightning."))


def _first(loader: Any) -> Any:
    """The first batch; of collections of loaders the first of each."""
    if isinstance(loader, Mapping):
        return {key: _first(part) for key, part in loader.items()}
    if isinstance(loader, (list, tuple)):
        return [_first(part) for part in loader]
    return next(iter(loader), None)


@contextmanager
def same_order(loader: Any) -> Iterator[None]:
    """Put the states of a loader's own generators back, so that it goes on in the order that it would have."""
    parts = list(loader.values()) if isinstance(loader, Mapping) else loader if isinstance(loader, list) else [loader]
    holders = [h for p in parts for h in (p, getattr(p, "sampler", None), getattr(p, "batch_sampler", None))]
    holders += [getattr(h, "sampler", None) for h in holders]
    generators = [g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)]
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _few(batch: Any, most: int = 8) -> Any:
    """The first samples of a batch, which are enough to verify with."""
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.extend(tensor.shape[:1]))
    size = max(sizes, default=0)
    return apply_to_collection(batch, Tensor, lambda t: t[:most] if t.ndim and t.shape[0] == size else t)


# ---------------------------------------------------------------- a step


class Step:
    """A step with the hooks around its batch; its calls of the Trainer do nothing.

    Args:
        pl_module: the LightningModule; it is attached to a Trainer.
        kind: name of the step.
        epochs: whether the hooks of a training epoch run around it, as if it were an epoch.
    """

    def __init__(self, pl_module: LightningModule, kind: str, epochs: bool = False) -> None:
        self._module, self._kind = pl_module, kind
        self._last: tuple[Any, ...] = ()
        self._counters: Mapping[str, Any] = {}
        self._epoch = _EPOCH if epochs and kind == TRAINING else ()
        self.__name__ = kind

    @property
    def epoch_hooks(self) -> tuple[str, ...]:
        """The hooks of an epoch that the LightningModule overrides, and that run."""
        return tuple(name for name in self._epoch if overrides(self._module, name))

    def __call__(self, *arguments: Any, **moment: Any) -> Any:
        """Run it, and return all that it returns, logs and differentiates.

        Args:
            arguments: of the step.
            moment: what the Trainer's counters are then.
        """
        module, kind = self._module, self._kind
        trainer: Any = module._trainer
        start, between, end = _AROUND[kind]
        self._counters = counters(moment)
        with quiet(module, trainer, self._counters) as record, getattr(trainer.precision_plugin, _CONTEXTS[kind])():
            for name in self._epoch[:1]:
                self._hook(name)
            self._hook(start, *arguments)
            out = getattr(module, kind)(*self._fitting(arguments))
            if between is not None and module.automatic_optimization:
                self._hook(between, *record.optimizers[:1])
                if overrides(module, "backward") and out is not None:
                    module.backward(out["loss"] if isinstance(out, Mapping) else out)
                if not torch.is_grad_enabled():
                    loss = out.get("loss") if isinstance(out, Mapping) else out
                    for optimizer in record.optimizers[:1]:
                        self._hook("optimizer_step", module.current_epoch, arguments[1], optimizer, lambda: loss)
            left = out if isinstance(out, (Tensor, dict)) or out is None else {}
            self._last = (end, left, *arguments)
            if not torch.is_grad_enabled():
                self.end()
        return [out, record.values]

    def moment(self) -> Mapping[str, Any]:
        """What the Trainer's counters were in the last call, where they were others than now."""
        return self._counters

    def end(self) -> None:
        """Run the hooks at the end of the batch and the epoch; where gradients are asked for, once they are there."""
        self._hook(*self._last)
        for name in self._epoch[1:]:
            self._hook(name)

    def _hook(self, name: str, *arguments: Any, **options: Any) -> None:
        if overrides(self._module, name):
            getattr(self._module, name)(*arguments, **options)

    def _fitting(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments that the step takes: without the number of the batch where it names none."""
        takes = takes_argument(getattr(self._module, self._kind), "batch_idx", min_args=2)
        return arguments if takes else (arguments[0], *arguments[2:])


def cannot_follow(error: Exception) -> MisconfigurationException:
    """The error of a step that cannot be recorded, with what to do about it.

    Example:
        >>> "validation_step" in str(cannot_follow(ValueError("The entry 'validation_step' does not run.")))
        True
    """
    return MisconfigurationException(
        f"What this LightningModule runs cannot be followed, so a compaction could break it: {error} Mend the step, or "
        "pass `ModelCompaction(steps=False)`, which looks at the model's own forward alone."
    )
