r"""Which part of the final amount is pruned at which progress: functions :math:`s(t)`, t and s in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable

from lightning_compress.packages import MisconfigurationException

Schedule = Callable[[float], float]


def one_shot(progress: float) -> float:
    """Everything at the start, :math:`s(t) = 1`.

    Example:
        >>> one_shot(0.0)
        1.0
    """
    return 1.0


def linear(progress: float) -> float:
    """The same amount each time, :math:`s(t) = t`.

    Example:
        >>> linear(0.25)
        0.25
    """
    return progress


def cubic(progress: float) -> float:
    """Quickly at first, ever slower towards the end, :math:`s(t) = 1 - (1 - t)^3` (Zhu and Gupta, 2017, "AGP").

    Example:
        >>> cubic(0.5)
        0.875
    """
    return 1.0 - (1.0 - progress) ** 3


SCHEDULES: dict[str, Schedule] = {"cubic": cubic, "linear": linear, "one_shot": one_shot}


def resolve(schedule: str | Schedule) -> Schedule:
    """The function behind a name.

    Args:
        schedule: ``"one_shot"``, ``"linear"``, ``"cubic"`` or a function of the progress.

    Returns:
        A function from [0, 1] to [0, 1].

    Raises:
        MisconfigurationException: if there is no schedule of that name.

    Example:
        >>> resolve("cubic") is cubic
        True
    """
    if callable(schedule):
        return schedule
    if schedule not in SCHEDULES:
        raise MisconfigurationException(f"`schedule={schedule!r}` is none of {', '.join(sorted(SCHEDULES))}.")
    return SCHEDULES[schedule]


def progress(position: int, start: int, end: int) -> float:
    """How far ``position`` is on the way from ``start`` to ``end``, in [0, 1].

    Example:
        >>> progress(3, 2, 6), progress(9, 2, 6), progress(2, 2, 2), progress(0, 2, 2)
        (0.25, 1.0, 1.0, 0.0)
    """
    if position >= end:
        return 1.0
    return 0.0 if position <= start else (position - start) / (end - start)


def last_position(total: int, per_epoch: int) -> int:
    """Where pruning is to be done by default: one epoch before the end, so that the last epoch trains at final
    sparsity.

    Args:
        total: epochs or optimizer steps of the fit.
        per_epoch: the same, of one epoch.

    Returns:
        A position; 0 (before the fit starts) where there is only one epoch.

    Example:
        >>> last_position(10, 1), last_position(300, 100), last_position(1, 1)
        (9, 200, 0)
    """
    return max(total - per_epoch, 0)
