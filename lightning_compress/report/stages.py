"""Accuracy against cost: logged metrics of the dense, the masked, the recovered and the compacted network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Point", "Stage", "against_cost", "metrics_of", "stages"]

_HELD_OUT = ("val", "valid", "test", "eval")


@dataclass(frozen=True)
class Point:
    """Metrics at the end of an epoch.

    Attributes:
        step: optimizer step.
        masked: number of masked entries of parameters.
        compacted: whether the model was compacted before.
        metrics: the latest metrics, by name.
    """

    step: int
    masked: int
    compacted: bool
    metrics: Mapping[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Convert the point to primitives.

        Example:
            >>> Point(**Point(3, 0, False, {"val_acc": 0.5}).state_dict()).metrics
            {'val_acc': 0.5}
        """
        return asdict(self)


@dataclass(frozen=True)
class Stage:
    """A stage of the network between dense and compacted.

    Attributes:
        name: dense, masked, recovered, compacted or fine-tuned.
        macs: multiply-accumulates per sample; None: not counted.
        params: number of parameters; None: not counted.
        metrics: metrics by name; empty if none were logged.
        step: optimizer step of the metrics; None: none were logged.
    """

    name: str
    macs: int | None
    params: int | None
    metrics: Mapping[str, float]
    step: int | None


def stages(
    points: Sequence[Point], dense: tuple[int, int], small: tuple[int, int] | None, exact: bool = True
) -> tuple[Stage, ...]:
    """Return the stages of a fit: the dense network before pruning, the masked network right after the last pruning and
    at the end of its recovery, the compacted network, and the compacted network after further training.

    Args:
        points: metrics of all epochs, in order.
        dense: multiply-accumulates and parameters of the dense network, which the masked one has, too.
        small: those of the compacted network; None: nothing was compacted.
        exact: whether the compacted network computes the same function as the masked one.

    Returns:
        The stages that took place. An exact compacted network has the metrics of the recovered one; otherwise it has
        none until it is validated.

    Example:
        >>> data = ((1, 0, 0.9), (2, 8, 0.7), (3, 8, 0.8))
        >>> logged = [Point(step, masked, False, {"acc": acc}) for step, masked, acc in data]
        >>> [(s.name, s.macs, s.metrics["acc"]) for s in stages(logged, (100, 10), (40, 4))]
        [('dense', 100, 0.9), ('masked', 100, 0.7), ('recovered', 100, 0.8), ('compacted', 40, 0.8)]
    """
    before = [point for point in points if not point.compacted]
    most = max((point.masked for point in before), default=0)
    final = [point for point in before if point.masked == most > 0]
    untouched = [point for point in before if not point.masked]
    chosen: list[Stage] = []
    if untouched:
        chosen.append(_stage("dense", dense, untouched[-1]))
    if final:
        chosen.append(_stage("masked", dense, final[0]))
    if len(final) > 1:
        chosen.append(_stage("recovered", dense, final[-1]))
    if small is not None:
        chosen.append(_stage("compacted", small, final[-1] if final and exact else None))
        tuned = [point for point in points if point.compacted]
        if tuned:
            chosen.append(_stage("fine-tuned", small, tuned[-1]))
    return tuple(chosen)


def _stage(name: str, costs: tuple[int, int], point: Point | None) -> Stage:
    macs, params = costs
    return Stage(name, macs, params, {} if point is None else point.metrics, None if point is None else point.step)


def metrics_of(chosen: Sequence[Stage]) -> list[str]:
    """Return the names of the logged metrics, those of held-out data first, and scores before losses.

    Args:
        chosen: the stages of a fit.
    """
    names = dict.fromkeys(name for stage in chosen for name in stage.metrics)
    return sorted(names, key=lambda name: (not name.startswith(_HELD_OUT), "loss" in name))


def against_cost(chosen: Sequence[Stage]) -> tuple[str, list[tuple[str, float, float]]]:
    """Return the points of a figure of accuracy against cost.

    Args:
        chosen: the stages of a fit.

    Returns:
        The metric, and (stage, multiply-accumulates, value) for each stage that has both; ``("", [])`` if fewer than
        two stages do.

    Example:
        >>> pair = (Stage("dense", 100, 10, {"val_acc": 0.9}, 1), Stage("compacted", 40, 4, {"val_acc": 0.8}, 3))
        >>> against_cost(pair)
        ('val_acc', [('dense', 100.0, 0.9), ('compacted', 40.0, 0.8)])
    """
    metric = next(iter(metrics_of(chosen)), "")
    rows = [(s.name, s.macs, s.metrics[metric]) for s in chosen if s.macs is not None and metric in s.metrics]
    points = [(name, float(macs), value) for name, macs, value in rows if math.isfinite(value)]
    return (metric, points) if len(points) > 1 else ("", [])
