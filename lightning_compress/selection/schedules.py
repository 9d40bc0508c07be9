r"""Schedules: functions :math:`s(t)` from the progress t to the fraction s of the final amount, both in [0, 1].

Each is a plain function, a factory (:func:`exponential`), or a combinator of other schedules (:func:`warm_up`). In YAML
a schedule is a name, a list of fractions, ``{name: {argument: value}}``, or an import path.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from engine.bounds import check_number, is_number
from lightning_compress.trainer.imports import imported
from lightning_compress.trainer.packages import MisconfigurationException

Schedule = Callable[[float], float]
ScheduleSpec = str | Sequence[float] | Mapping[str, Mapping[str, Any] | None] | Schedule


def one_shot(progress: float) -> float:
    """Prune the full amount at the start, :math:`s(t) = 1`.

    Example:
        >>> one_shot(0.0)
        1.0
    """
    return 1.0


def linear(progress: float) -> float:
    """Prune at a constant rate, :math:`s(t) = t`.

    Example:
        >>> linear(0.25)
        0.25
    """
    return progress


def cubic(progress: float) -> float:
    """Prune at a falling rate, :math:`s(t) = 1 - (1 - t)^3` (Zhu and Gupta, 2017, "AGP").

    Example:
        >>> cubic(0.5)
        0.875
    """
    return 1.0 - (1.0 - progress) ** 3


def exponential(rate: float = 5.0) -> Schedule:
    r"""Prune at an exponentially falling rate, :math:`s(t) = (1 - e^{-rt}) / (1 - e^{-r})`.

    Args:
        rate: r > 0; larger values prune earlier.

    Example:
        >>> round(exponential(5.0)(0.5), 3)
        0.924
    """
    if not is_number(rate) or not 0 < rate < math.inf:
        raise MisconfigurationException(f"`rate` of the exponential schedule must be a number > 0, got {rate!r}.")
    return _Exponential(rate=rate)


@dataclass(frozen=True)
class _Exponential:
    rate: float

    def __call__(self, progress: float) -> float:
        return math.expm1(-self.rate * progress) / math.expm1(-self.rate)


def iterative(rounds: int = 5, schedule: ScheduleSpec = "linear") -> Schedule:
    """Prune n times, from the start to the end, with training in between.

    Args:
        rounds: n, at least 1.
        schedule: amounts of the prunings, evaluated at t = 1/n, 2/n, …, 1.

    Example:
        >>> [iterative(2)(t) for t in (0.0, 0.5, 1.0)]
        [0.5, 0.5, 1.0]
    """
    if not is_number(rounds, whole=True) or rounds < 1:
        raise MisconfigurationException(f"`rounds` of the iterative schedule must be an integer >= 1, got {rounds!r}.")
    return _Iterative(rounds=rounds, schedule=resolve(schedule))


@dataclass(frozen=True)
class _Iterative:
    rounds: int
    schedule: Schedule

    def __call__(self, progress: float) -> float:
        return self.schedule(min((math.floor(progress * (self.rounds - 1) + 1e-9) + 1) / self.rounds, 1.0))


def listed(values: Sequence[float]) -> Schedule:
    """Prune the listed fractions at equal intervals, from the start to the end.

    Args:
        values: non-decreasing fractions of the amount, in [0, 1].

    Example:
        >>> [listed([0.1, 0.6, 1.0])(t) for t in (0.0, 0.4, 0.5, 1.0)]
        [0.1, 0.1, 0.6, 1.0]
    """
    return _rising(values, "schedule")


def _rising(values: Any, argument: str) -> Schedule:
    fractions: list[Any] = [values] if isinstance(values, (str, bytes)) else list(values)
    fits = all(is_number(fraction) and 0 <= fraction <= 1 for fraction in fractions)
    if not fits or not fractions or fractions != sorted(fractions):
        raise MisconfigurationException(f"A list as `{argument}` must hold rising fractions in [0, 1], got {values!r}.")
    return _Listed(values=tuple(map(float, fractions)))


@dataclass(frozen=True)
class _Listed:
    values: Sequence[float]

    def __call__(self, progress: float) -> float:
        return self.values[math.floor(min(progress, 1.0) * (len(self.values) - 1) + 1e-9)]


def warm_up(part: float, schedule: ScheduleSpec = "cubic") -> Schedule:
    """Prune nothing in the first part of the time, then follow a schedule.

    Args:
        part: fraction of the time, in [0, 1).
        schedule: schedule of the rest of the time.

    Example:
        >>> [warm_up(0.5, "linear")(t) for t in (0.0, 0.5, 0.75, 1.0)]
        [0.0, 0.0, 0.5, 1.0]
    """
    return _WarmUp(part=_part("warm_up", part), schedule=resolve(schedule))


@dataclass(frozen=True)
class _WarmUp:
    part: float
    schedule: Schedule

    def __call__(self, progress: float) -> float:
        return (
            self.schedule((progress - self.part) / (1.0 - self.part)) if progress >= self.part and progress > 0 else 0.0
        )


def cool_down(part: float, schedule: ScheduleSpec = "cubic") -> Schedule:
    """Follow a schedule, but prune nothing in the last part of the time.

    Args:
        part: fraction of the time, in [0, 1).
        schedule: schedule of the rest of the time.

    Example:
        >>> [cool_down(0.5, "linear")(t) for t in (0.0, 0.25, 0.5, 1.0)]
        [0.0, 0.5, 1.0, 1.0]
    """
    return _CoolDown(part=_part("cool_down", part), schedule=resolve(schedule))


@dataclass(frozen=True)
class _CoolDown:
    part: float
    schedule: Schedule

    def __call__(self, progress: float) -> float:
        return self.schedule(min(progress / (1.0 - self.part), 1.0))


def joined(first: ScheduleSpec, second: ScheduleSpec, at: float = 0.5, level: float = 0.5) -> Schedule:
    """Follow one schedule up to a level, then another one.

    Args:
        first: schedule from 0 to ``level``, until ``at``.
        second: schedule from ``level`` to 1, after ``at``.
        at: fraction of the time, in (0, 1).
        level: fraction of the amount, in [0, 1].

    Example:
        >>> [joined("one_shot", "linear", at=0.5, level=0.25)(t) for t in (0.0, 0.25, 0.75, 1.0)]
        [0.25, 0.25, 0.625, 1.0]
    """
    for name, value in (("at", at), ("level", level)):
        check_number(name, value, 0, error=MisconfigurationException)
    if not 0 < at < 1 or not 0 <= level <= 1:
        raise MisconfigurationException(f"`at` must be in (0, 1), `level` in [0, 1]; got at={at!r}, level={level!r}.")
    return _Joined(first=resolve(first), second=resolve(second), at=at, level=level)


@dataclass(frozen=True)
class _Joined:
    first: Schedule
    second: Schedule
    at: float
    level: float

    def __call__(self, progress: float) -> float:
        if progress < self.at:
            return self.level * self.first(progress / self.at)
        return self.level + (1.0 - self.level) * self.second((progress - self.at) / (1.0 - self.at))


def _part(name: str, part: float) -> float:
    if not is_number(part) or not 0 <= part < 1:
        raise MisconfigurationException(f"`part` of {name} must be a fraction of the time in [0, 1), got {part!r}.")
    return float(part)


SCHEDULES: dict[str, Schedule] = {"cubic": cubic, "linear": linear, "one_shot": one_shot}
_OWN = tuple(SCHEDULES.values())
_KINDS = (_Exponential, _Iterative, _Listed, _WarmUp, _CoolDown, _Joined)
FACTORIES: dict[str, Callable[..., Schedule]] = {
    "cool_down": cool_down,
    "exponential": exponential,
    "iterative": iterative,
    "joined": joined,
    "listed": listed,
    "warm_up": warm_up,
}


@dataclass(frozen=True)
class _Checked:
    """A schedule of the user's, whose results are checked."""

    schedule: Schedule
    argument: str

    def __call__(self, progress: float) -> float:
        fraction: Any = self._call(progress)
        try:
            fits = not isinstance(fraction, (str, bytes)) and 0 <= float(fraction) <= 1
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise MisconfigurationException(
                f"The function `{self.argument}={self.schedule!r}` returned {fraction!r} for the progress "
                f"{progress:.4g}. It must return a fraction in [0, 1], and 1 stands for all of the amount."
            )
        return float(fraction)

    def _call(self, progress: float) -> Any:
        try:
            return self.schedule(progress)
        except Exception as error:
            raise MisconfigurationException(
                f"The function `{self.argument}={self.schedule!r}` failed for the progress {progress:.4g}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _checked(schedule: Schedule, argument: str) -> Schedule:
    checked = _Checked(schedule=schedule, argument=argument)
    for share in (0.0, 0.5, 1.0):  # most mistakes show here, before the fit
        checked(share)
    return checked


def resolve(schedule: ScheduleSpec, argument: str = "schedule") -> Schedule:
    """Resolve a specification to a function.

    Args:
        schedule: a name, a list of fractions, ``{name: {argument: value}}``, an import path, or a function of the
            progress.
        argument: name of the argument that holds it, for errors.

    Returns:
        A function from [0, 1] to [0, 1]; it raises an error if the user's function returns anything else.

    Raises:
        MisconfigurationException: for an unknown schedule or invalid arguments.

    Example:
        >>> resolve("cubic") is cubic, resolve([0.5, 1.0])(0.2), resolve({"exponential": {"rate": 3}})(1.0)
        (True, 0.5, 1.0)
    """
    if callable(schedule):
        return schedule if schedule in _OWN or isinstance(schedule, _KINDS) else _checked(schedule, argument)
    if isinstance(schedule, Mapping):
        return _schedule_from(schedule, argument)
    if not isinstance(schedule, str):
        return _rising(schedule, argument)
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    if schedule in FACTORIES:
        return _schedule_from({schedule: {}}, argument)
    return resolve(imported(schedule, argument, [*SCHEDULES, *FACTORIES]), argument)


def _schedule_from(schedule: Mapping[str, Mapping[str, Any] | None], argument: str) -> Schedule:
    choices = ", ".join(sorted(FACTORIES))
    if len(schedule) != 1 or not set(schedule) <= set(FACTORIES):
        raise MisconfigurationException(f"`{argument}={dict(schedule)!r}` must name one of {choices}.")
    (name, arguments), *_ = schedule.items()
    if not isinstance(arguments, (Mapping, NoneType)):
        raise MisconfigurationException(
            f"`{argument}={dict(schedule)!r}` must map {name!r} to its arguments by name, as in "
            f"{{{name!r}: {{{next(iter(inspect.signature(FACTORIES[name]).parameters))!r}: {arguments!r}}}}}."
        )
    try:
        return FACTORIES[name](**(arguments or {}))
    except TypeError as error:
        raise MisconfigurationException(f"`{argument}={dict(schedule)!r}` is invalid: {error}.") from error


def progress(position: int, start: int, end: int) -> float:
    """Return the progress of ``position`` from ``start`` to ``end``, in [0, 1].

    Example:
        >>> progress(3, 2, 6), progress(9, 2, 6), progress(2, 2, 2), progress(0, 2, 2)
        (0.25, 1.0, 1.0, 0.0)
    """
    if position >= end:
        return 1.0
    return 0.0 if position <= start else (position - start) / (end - start)
