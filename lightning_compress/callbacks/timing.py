"""Timing of events in a fit: start, end and interval, in epochs or optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn

from engine.bounds import check_number
from lightning_compress.selection import schedules
from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

EVENTS_BY_STEP = 20


@dataclass(frozen=True)
class Timing:
    """Start, end and interval of events.

    Attributes:
        start: epoch or optimizer step of the first event; None: the first of the fit.
        end: epoch or optimizer step of the last event; None: derived from the length of the fit.
        unit: ``"epoch"`` or ``"step"``.
        frequency: epochs or steps between two events; None: 1 epoch, or a twentieth of the steps.
        cool_down: epochs or steps without events before the fit ends, if ``end`` is None; None: one epoch.
        early: number of epochs before the first event, if ``start`` is None.

    Raises:
        MisconfigurationException: for invalid or contradictory arguments.

    Example:
        >>> Timing(start=2, end=6).progress(3, (2, 6))
        0.25
    """

    start: int | None = None
    end: int | None = None
    unit: str = "epoch"
    frequency: int | None = None
    cool_down: int | None = None
    early: int = 0

    def __post_init__(self) -> None:
        start, end, unit, cool_down = self.start, self.end, self.unit, self.cool_down
        if unit not in ("epoch", "step"):
            raise MisconfigurationException(f"`unit` must be 'epoch' or 'step', got {unit!r}.")
        lowest = {"start": 0, "end": None, "frequency": 1, "cool_down": 0}
        for name, least in lowest.items():
            if (value := getattr(self, name)) is not None:
                what = f"a number of {unit}s"
                check_number(name, value, least, whole=True, what=what, error=MisconfigurationException)
        if end is not None and end < (start or 0):
            raise MisconfigurationException(f"`end` must not precede `start`, got start={start!r}, end={end!r}.")
        if end is not None and cool_down is not None:
            raise MisconfigurationException(
                f"Pass `end` or `cool_down`, not both: got end={end!r}, cool_down={cool_down!r}."
            )

    def window(self, trainer: Trainer) -> tuple[int, int]:
        """Return the start and the end in a fit.

        Raises:
            MisconfigurationException: if the length of the fit is unknown, or the end precedes the start.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return self.early, self.early  # a fast_dev_run of a few batches should run the events too
        start = self._first(trainer) if self.start is None else self.start
        end = self._last(trainer) if self.end is None else self.end
        if start > end:
            why = "" if self.start is not None else " (the criterion first collects statistics)"
            raise MisconfigurationException(
                f"`start={start}`{why} is after {self.unit} {end}, by which pruning must end so that the last epoch "
                f"trains at final sparsity. Train longer, or pass `end`{'' if why == '' else ' and `start`'}."
            )
        return start, end

    def check_reached(self, what: str, trainer: Trainer, window: tuple[int, int]) -> None:
        """Warn if the fit ends before the first event.

        Args:
            what: name of the callback.
            trainer: the Trainer of the fit that is about to start.
            window: as `window` returns it.
        """
        total = length(trainer, self.unit)
        if total is not None and not self.reached(window[0], total) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"`{what}` has no effect in this fit: it starts at {self.unit} {window[0]}, but the fit ends after "
                f"{total} {self.unit}s. Train longer, or start it earlier."
            )

    def warn_unfinished(self, window: tuple[int, int], fraction: float) -> None:
        """Warn that a fit ended before the last event of `ChannelPruning`.

        Args:
            window: as `window` returns it.
            fraction: what was reached of the amount.
        """
        rank_zero_warn(
            f"The fit ended before {self.unit} {window[1]}, the end of the schedule of `ChannelPruning`: only "
            f"{fraction:.0%} of the amount is masked."
        )

    def reached(self, position: int, total: int) -> bool:
        """Whether an event at a position precedes the end of a fit of ``total`` epochs or steps."""
        return position < total if self.unit == "epoch" else position <= total  # steps are counted when they end

    def first_epoch(self, trainer: Trainer) -> int:
        """Return the epoch of the first event; 0 if events go by steps and the steps per epoch are unknown."""
        start, per_epoch = self.window(trainer)[0], _steps_per_epoch(trainer)
        if self.unit == "epoch":
            return start
        return start // per_epoch if per_epoch else 0

    def position(self, trainer: Trainer) -> int:
        """Return the current epoch or step."""
        return trainer.current_epoch if self.unit == "epoch" else trainer.global_step

    def progress(self, position: int, window: tuple[int, int]) -> float:
        """Return the progress of a position within the window, in [0, 1]."""
        return schedules.progress(position, *window)

    def due(self, position: int, last: int | None, window: tuple[int, int]) -> bool:
        """Whether an event is due at a position if the last one was at ``last``."""
        start, end = window
        frequency = self.frequency or (1 if self.unit == "epoch" else max(1, (end - start) // EVENTS_BY_STEP))
        return position >= start and (last is None or position - last >= frequency or position >= end)

    def _first(self, trainer: Trainer) -> int:
        if not self.early or self.unit == "epoch":
            return self.early
        return min(self.early * max(_steps_per_epoch(trainer), 1), 100)

    def _last(self, trainer: Trainer) -> int:
        steps, per_epoch = trainer.estimated_stepping_batches, _steps_per_epoch(trainer)
        if self.unit == "epoch" and trainer.max_epochs not in (None, -1) and trainer.max_steps == -1:
            return self._before_the_end(int(trainer.max_epochs), 1)
        has_length = per_epoch and math.isfinite(steps) and steps >= 0
        if not has_length or (self.unit == "step" and not trainer.lightning_module.automatic_optimization):
            raise MisconfigurationException(
                f"The length of the fit in {self.unit}s is not known beforehand (max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}, {trainer.num_training_batches} batches per epoch): pass `end`."
            )
        if self.unit == "step":
            return self._before_the_end(int(steps), per_epoch)
        return self._before_the_end(math.ceil(steps / per_epoch), 1)

    def _before_the_end(self, total: int, per_epoch: int) -> int:
        return max(total - (per_epoch if self.cool_down is None else self.cool_down), 0)


def _steps_per_epoch(trainer: Trainer) -> int:
    """Return the number of optimizer steps per epoch; 0 if unknown."""
    batches = trainer.num_training_batches
    return math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else 0


def length(trainer: Trainer, unit: str) -> int | None:
    """Return the maximum number of epochs or optimizer steps of a fit; None if unknown.

    Args:
        trainer: the Trainer of the fit that is about to start.
        unit: ``"epoch"`` or ``"step"``.
    """
    per_epoch = _steps_per_epoch(trainer)
    steps = [trainer.max_steps] if trainer.max_steps >= 0 else []
    epochs = [int(trainer.max_epochs)] if trainer.max_epochs not in (None, -1) else []
    if unit == "epoch":
        epochs += [math.ceil(total / per_epoch) for total in steps if per_epoch]
        return min(epochs, default=None)
    manual = not trainer.lightning_module.automatic_optimization  # the number of steps per batch is up to the user
    steps += [total * per_epoch for total in epochs if per_epoch and not manual]
    return min(steps, default=None)
