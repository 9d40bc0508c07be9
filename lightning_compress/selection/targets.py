"""Pruning targets (channels, parameters, multiply-accumulates, measured latency), and the search that meets them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

import engine
from engine.bounds import check_number
from engine.cost import Predictor
from engine.program import copied
from engine.running import resolve_inputs
from lightning_compress.selection.ladders import Descent, Pool, kept_after
from lightning_compress.trainer.packages import MisconfigurationException

TARGETS = ("channels", "latency", "macs", "params")
UNITS = {"latency": "s", "macs": "multiply-accumulates", "params": "parameters"}

Keep = Mapping[str, Tensor]
Cost = Callable[[Keep], float]

# Relative tolerance of a measured latency.
TOLERANCE = 0.04
# Latency is measured until the relative standard error of the median is this small, or so many times.
PRECISION, REPEATS = 0.01, 4


def smallest(cost: Callable[[int], float], count: int, budget: float, tolerance: float = 0.0) -> int:
    """Find the smallest n in [0, count] with ``cost(n) <= budget``, or ``count``, by interpolation and bisection.

    Args:
        cost: non-increasing function of n.
        count: the largest n.
        budget: maximum cost.
        tolerance: accept an n whose cost differs from the budget by at most this.

    Example:
        >>> smallest(lambda n: 100 - n, 100, 37.5)
        63
    """
    cached_cost = functools.cache(cost)
    low, high = 0, count
    if cached_cost(low) <= budget or cached_cost(high) > budget:
        return low if cached_cost(low) <= budget else high
    for turn in range(2 * count + 2):
        if high - low <= 1:
            break
        share = (
            (cached_cost(low) - budget) / max(cached_cost(low) - cached_cost(high), 1e-300) if turn % 2 == 0 else 0.5
        )
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        if abs(cached_cost(middle) - budget) <= tolerance > 0:
            return middle
        low, high = (low, middle) if cached_cost(middle) <= budget else (middle, high)
    return high


@dataclass(frozen=True, eq=False)
class Subject:
    """The model to prune, with its analysis.

    Attributes:
        model: the model.
        example: example input of the model.
        graph: its graph.
        groups: its groups.
        context: context to run it in, as the Trainer does.
        shared: objects that are not copied with the model.
        widths: allowed numbers of units by group name; groups without an entry may have any.
    """

    model: nn.Module
    example: Any
    graph: engine.Graph
    groups: Sequence[engine.Group]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    shared: tuple[Any, ...] = field(default=())
    widths: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def counted(self, target: str, keep: Keep) -> float:
        """Count the exact cost of the compacted model."""
        masks = engine.group_masks(self.groups, keep)
        counts = engine.count_flops_params(self.model, self.example, verbose=False, masks=masks, graph=self.graph)
        return float(counts[0] if target == "macs" else counts[1])

    def compacted(self, keep: Keep) -> nn.Module:
        """Return a compacted copy of the model."""
        model = copied(self.model, self.shared)
        masks = engine.group_masks(self.groups, keep)
        small: nn.Module = engine.ModelSpeedup(model, self.example, masks, confidence=0).speedup_model()
        return small

    def seconds(self, models: Sequence[nn.Module], rounds: int = 15) -> list[list[float]]:
        """Measure the time of one forward pass of each model, in turns, so that changes of load affect all equally."""
        args, kwargs = resolve_inputs(self.example)
        times_by_model: list[list[float]] = [[] for _ in models]
        with torch.inference_mode(), self.context():
            for _turn in range(rounds + 2):
                for times, model in zip(times_by_model, models, strict=True):
                    with _eval_mode(model):
                        times.append(_timed(functools.partial(model, *args, **kwargs), self.device))
        return [times[2:] for times in times_by_model]  # the first two are warm-up

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def reference(subject: Subject, target: str) -> float:
    """Return the model's current cost: multiply-accumulates per sample, parameters, or seconds per forward pass."""
    if target == "latency":
        return steady(lambda: subject.seconds([subject.model])[0])
    return subject.counted(target, {})


def steady(measure: Callable[[], Sequence[float]]) -> float:
    """Return the median of measurements, repeating them until it is precise.

    Args:
        measure: returns more measurements at each call.

    Example:
        >>> steady(lambda: [2.0, 2.0, 3.0])
        2.0
    """
    measurements: list[float] = []
    for _turn in range(REPEATS):
        measurements += measure()
        low, middle, high = quantiles(measurements, n=4)
        # Standard error of a median, estimated from the quartiles, which are robust to outliers.
        if 0.93 * (high - low) / math.sqrt(len(measurements)) <= PRECISION * middle:
            break
    return median(measurements)


def hit_count(subject: Subject, descent: Descent, target: str, budget: float) -> dict[str, Tensor]:
    """Choose the units to keep for an exact budget of parameters or multiply-accumulates.

    The search uses predictions that do not read weights. The result is counted exactly; if constants of removed
    channels add to its cost, the search is repeated with a budget that is smaller by the difference.
    """
    predict, position = Predictor(subject.model, subject.graph, subject.groups), 0 if target == "macs" else 1
    steps, margin = 0, 0.0
    for _ in range(4):
        steps = smallest(lambda n: predict(descent.keep(n))[position], len(descent), budget - margin)
        exact = subject.counted(target, descent.keep(steps))
        if exact <= budget or steps == len(descent):
            break
        margin += exact - budget
    return descent.keep(steps)


def hit_latency(subject: Subject, descent: Descent, budget: float, dense: float) -> dict[str, Tensor]:
    """Choose the units to keep such that the latency of the compacted model meets a budget.

    Args:
        subject: the model.
        descent: order in which units are removed.
        budget: seconds.
        dense: measured seconds of the unpruned model.

    Warns if the latency does not meet the budget even without all units that may be removed.
    """
    lost = any(one.dense > one.group.size for pool in descent.pools for one in pool.ladders)
    now = reference(subject, "latency") if lost else dense  # the load may have changed, so prefer ratios

    @functools.cache
    def cost(count: int) -> float:
        if count == 0:
            return now
        small = subject.compacted(descent.keep(count))

        def ratios() -> list[float]:
            return [b / a for a, b in zip(*subject.seconds([subject.model, small]), strict=True)]

        return now * steady(ratios)

    steps = smallest(cost, len(descent), budget, TOLERANCE * budget)
    if steps == len(descent) and cost(steps) > (1 + TOLERANCE) * budget:
        rank_zero_warn(
            f"The target of {budget:.3g} s per forward pass is not reached: {cost(steps):.3g} s of {now:.3g} s remain "
            "although all removable channels are masked. Prune more layers, or raise `max_amount` or the budget."
        )
    return descent.keep(steps)


def hit_channels(parts: Sequence[tuple[float, Pool]], fraction: float) -> dict[str, Tensor]:
    """Choose the units to keep when each pool loses its amount times a fraction, rounded down."""
    kept: dict[str, Tensor] = {}
    for amount, pool in parts:
        kept |= kept_after(pool, pool.count(amount * fraction))
    return kept


def check_target(target: str, amount: Any, budget: float | None) -> None:
    """Check the target and its amount or budget.

    Raises:
        MisconfigurationException: naming an invalid argument.
    """
    if target not in TARGETS:
        raise MisconfigurationException(f"`target` must be one of {', '.join(TARGETS)}, got {target!r}.")
    if target != "channels" and isinstance(amount, Mapping):
        raise MisconfigurationException(
            f"`amount` by pattern requires `target='channels'`. With `target={target!r}` it is one fraction of the "
            "whole model; use `max_amount`, which accepts patterns, to limit what each layer loses."
        )
    if budget is None:
        return
    if target == "channels":
        raise MisconfigurationException("`budget` requires `target` 'latency', 'macs' or 'params'; pass `amount`.")
    check_number("budget", budget, above=0, what=f"a finite number of {UNITS[target]}", error=MisconfigurationException)
