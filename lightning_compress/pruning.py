"""Pruning while training: which channels go, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

import engine
from lightning_compress import criteria, schedules, selection
from lightning_compress.base import to_device
from lightning_compress.masking import MaskingCallback, masks_anything
from lightning_compress.packages import MisconfigurationException
from lightning_compress.repair import MaskConflictRepair

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch import nn

    from lightning_compress.selection import Masks

EVENTS_BY_STEP = 20


class ChannelPruning(MaskingCallback):
    r"""Masks the least important channels of whole dependency groups, more of them as training goes on.

    At progress t of the schedule, :math:`\lfloor s(t) \cdot amount \cdot size \rfloor` channels of each group are
    masked; one stays at least, and what is masked stays masked. Where channels can only go in equal numbers (of each
    group of a grouped convolution, say), equally many of each are masked. Weights are zeroed in place, their gradients
    and whatever the optimizer writes there too.

    Args:
        criterion: which channels go: ``"l1"``, ``"l2"``, ``"random"``, a function of a group and a parameter getter, or
            its import path.
        amount: fraction of the channels of each group in [0, 1], or fractions by layer name pattern.
        schedule: ``"one_shot"``, ``"linear"``, ``"cubic"``, or a function from [0, 1] to [0, 1].
        start: epoch or optimizer step of the first pruning; by default the first.
        end: epoch or optimizer step at which the whole amount is masked; by default one epoch before the end of the
            fit, in a fit of one epoch before it starts.
        unit: ``"epoch"``: prunes at the start of epochs; ``"step"``: after optimizer steps.
        frequency: epochs or steps between two prunings; by default 1 epoch, or the steps that make twenty prunings.
        layers: name patterns (`fnmatch`) of the layers to prune; by default all, the output layer excepted.
        exclude: name patterns of layers to leave alone, with all that is coupled to them.
        model: path of the model inside the LightningModule.
        example_input: what the model takes.
        seed: seed of ``"random"``.

    Raises:
        MisconfigurationException: if an argument is none of the above.

    Example:
        >>> pruning = ChannelPruning("l1", amount=0.5, exclude="stem.*")
        >>> pruning.masks
        {}
    """

    def __init__(
        self,
        criterion: str | criteria.Criterion = "l1",
        amount: float | Mapping[str, float] = 0.5,
        schedule: str | schedules.Schedule = "cubic",
        start: int | None = None,
        end: int | None = None,
        unit: str = "epoch",
        frequency: int | None = None,
        layers: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        model: str | None = None,
        example_input: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, example_input)
        selection.check_amount(amount)
        _check_times(start, end, unit, frequency)
        self.criterion, self.amount, self.schedule, self.seed = criterion, amount, schedule, seed
        self.unit = unit
        self.start, self.end, self.frequency = start or 0, end, frequency
        self.layers, self.exclude = selection.as_patterns(layers), selection.as_patterns(exclude)
        self._criterion = criteria.resolve(criterion, seed)
        self._schedule = schedules.resolve(schedule)
        self._fraction = 0.0
        self._last_event: int | None = None
        self._window = (self.start, self.start if end is None else end)

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(model=self.model, layers=self.layers, exclude=self.exclude)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fraction": self._fraction, "last_event": self._last_event}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._fraction, self._last_event = state_dict["fraction"], state_dict["last_event"]

    @override
    def forget(self) -> None:
        super().forget()
        self._fraction, self._last_event = 0.0, None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What cannot work fails here, before the first epoch, and not at the first pruning.
        model, example = self.target(pl_module)[1], self.example(trainer, pl_module)
        self._amounts(engine.dependency_groups(model, example))
        self._window = (self.start, self._last_position(trainer) if self.end is None else self.end)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._window = (0, 0)  # a rehearsal of a few batches: it should rehearse the pruning too
        if self._window[0] > self._window[1]:
            raise MisconfigurationException(
                f"`start={self.start}` lies behind {self.unit} {self._window[1]}, where pruning has to be done so that "
                f"the last epoch trains at final sparsity. Train longer, or give `end`."
            )

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._advance(trainer, pl_module, trainer.current_epoch if self.unit == "epoch" else trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # Within an accumulation the step count stands still, and so does the schedule: gradients gathered under the old
        # masks never meet new ones.
        if self.unit == "step":
            self._advance(trainer, pl_module, trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fraction < self._schedule(1.0):
            rank_zero_warn(
                f"The fit ended before {self.unit} {self._window[1]}, where the schedule of `ChannelPruning` ends: "
                f"{self._fraction:.0%} of the amount is masked."
            )

    def _last_position(self, trainer: Trainer) -> int:
        batches, steps = trainer.num_training_batches, trainer.estimated_stepping_batches
        per_epoch = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else 0
        known = per_epoch and math.isfinite(steps) and steps >= 0
        if self.unit == "epoch" and trainer.max_epochs not in (None, -1) and trainer.max_steps == -1:
            return schedules.last_position(int(trainer.max_epochs), 1)
        if not known or (self.unit == "step" and not pl_automatic(trainer)):
            raise MisconfigurationException(
                f"The length of the fit in {self.unit}s is not known beforehand (max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}, {batches} batches an epoch): give `end`."
            )
        if self.unit == "step":
            return schedules.last_position(int(steps), per_epoch)
        return schedules.last_position(math.ceil(steps / per_epoch), 1)

    def _due(self, position: int) -> bool:
        start, end = self._window
        frequency = self.frequency or (1 if self.unit == "epoch" else max(1, (end - start) // EVENTS_BY_STEP))
        waited = self._last_event is None or position - self._last_event >= frequency
        return position >= start and (waited or position >= end)

    def _advance(self, trainer: Trainer, pl_module: LightningModule, position: int) -> None:
        fraction = self._schedule(schedules.progress(position, *self._window))
        if not self._due(position) or fraction <= self._fraction:
            return
        self._prune(trainer, pl_module, fraction)
        self._fraction, self._last_event = fraction, position

    def _prune(self, trainer: Trainer, pl_module: LightningModule, fraction: float) -> None:
        model, example = self.target(pl_module)[1], self.example(trainer, pl_module)
        graph = engine.trace(model, example)
        masks = self._choose(model, engine.dependency_groups(model, example, graph=graph), fraction)
        # Every repair in the Trainer is asked before a weight is zeroed, wherever it stands in the list of callbacks.
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MaskConflictRepair) and masks_anything(masks):
                masks = callback.repaired(masks, model, example, graph)
        boolean = {module: {name: mask != 0 for name, mask in own.items()} for module, own in masks.items()}
        self.impose(pl_module, trainer.strategy.broadcast(to_device(boolean, "cpu")))

    def _choose(self, model: nn.Module, groups: Sequence[engine.Group], fraction: float) -> Masks:
        previous, amounts, keep = selection.kept_units(groups, self._masks), self._amounts(groups), {}
        for group in groups:
            if amounts.get(group.name):
                scores = criteria.score(self._criterion, group, model.get_parameter)
                part = amounts[group.name] * fraction
                keep[group.name] = selection.select(scores, part, previous[group.name], group.rows)
        return dict(engine.group_masks(groups, keep))

    def _amounts(self, groups: Sequence[engine.Group]) -> dict[str, float]:
        return selection.amounts(groups, self.amount, self.layers, self.exclude)


def pl_automatic(trainer: Trainer) -> bool:
    """Whether Lightning steps the optimizer, once a batch or accumulation."""
    return trainer.lightning_module.automatic_optimization


def _check_times(start: int | None, end: int | None, unit: str, frequency: int | None) -> None:
    checks: dict[str, Callable[[], bool]] = {
        f"`unit` is 'epoch' or 'step', got {unit!r}.": lambda: unit in ("epoch", "step"),
        f"`start` is a number of {unit}s from 0 on, got {start!r}.": lambda: start is None or start >= 0,
        f"`end` comes after `start`, got start={start!r}, end={end!r}.": lambda: end is None or end >= (start or 0),
        f"`frequency` is a number of {unit}s from 1 on, got {frequency!r}.": lambda: (
            frequency is None or frequency >= 1
        ),
    }
    for message, holds in checks.items():
        if not holds():
            raise MisconfigurationException(message)
