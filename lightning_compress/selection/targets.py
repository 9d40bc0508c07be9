"""What an amount is a fraction of: channels, parameters, multiply-accumulates, or measured time; and how it is hit."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.cost import Predictor
from engine.recording import resolve_inputs
from lightning_compress.selection.ladders import Descent, Pool, kept_after
from lightning_compress.trainer.packages import MisconfigurationException

TARGETS = ("channels", "latency", "macs", "params")
UNITS = {"latency": "s", "macs": "multiply-accumulates", "params": "parameters"}

Keep = Mapping[str, Tensor]
Cost = Callable[[Keep], float]

# A measured time is near enough once it differs from the wanted one by this part of it.
TOLERANCE = 0.04
# Times are measured again until the standard error of their median is this part of it, or so many times.
PRECISION, REPEATS = 0.01, 4


def smallest(cost: Callable[[int], float], count: int, budget: float, tolerance: float = 0.0) -> int:
    """The smallest n in [0, count] with ``cost(n) <= budget``, or ``count``, found by interpolation and bisection.

    Args:
        cost: does not grow with n.
        count: the largest n.
        budget: what it may cost.
        tolerance: an n whose cost is that near the budget is good enough.

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
    """The model whose cost is asked.

    Attributes:
        model: the model.
        example: what it takes.
        graph: its graph.
        groups: its groups.
        context: context to run it in, as the trainer does.
        shared: what is not copied along with the model.
        widths: by group name the numbers of units that may stay, where not all may.
    """

    model: nn.Module
    example: Any
    graph: engine.Graph
    groups: Sequence[engine.Group]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    shared: tuple[Any, ...] = field(default=())
    widths: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def counted(self, target: str, keep: Keep) -> float:
        """Exactly what the compacted model will have."""
        masks = engine.group_masks(self.groups, keep)
        counts = engine.count_flops_params(self.model, self.example, verbose=False, masks=masks, graph=self.graph)
        return float(counts[0] if target == "macs" else counts[1])

    def compacted(self, keep: Keep) -> nn.Module:
        """A compacted copy; the model stays as it is."""
        model = copy.deepcopy(self.model, {id(part): part for part in self.shared})
        masks = engine.group_masks(self.groups, keep)
        small: nn.Module = engine.ModelSpeedup(model, self.example, masks, confidence=0).speedup_model()
        return small

    def seconds(self, models: Sequence[nn.Module], rounds: int = 15) -> list[list[float]]:
        """Time of one evaluation of each model, in turns, so that a change of load hits all alike."""
        args, kwargs = resolve_inputs(self.example)
        times_by_model: list[list[float]] = [[] for _ in models]
        with torch.inference_mode(), self.context():
            for _turn in range(rounds + 2):
                for times, model in zip(times_by_model, models, strict=True):
                    with _eval_mode(model):
                        times.append(_timed(functools.partial(model, *args, **kwargs), self.device))
        return [times[2:] for times in times_by_model]  # the first two are slower

    @property
    def device(self) -> torch.device:
        """Where the model is."""
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
    """What the model costs as it is: multiply-accumulates per sample, parameters, or seconds of one evaluation."""
    if target == "latency":
        return steady(lambda: subject.seconds([subject.model])[0])
    return subject.counted(target, {})


def steady(measure: Callable[[], Sequence[float]]) -> float:
    """Median of measurements, of ever more of them as long as they scatter.

    Args:
        measure: gives some more, each time it is called.

    Example:
        >>> steady(lambda: [2.0, 2.0, 3.0])
        2.0
    """
    measurements: list[float] = []
    for _turn in range(REPEATS):
        measurements += measure()
        low, middle, high = quantiles(measurements, n=4)
        # Of a median, where the spread is taken from the quartiles, as single outliers say nothing.
        if 0.93 * (high - low) / math.sqrt(len(measurements)) <= PRECISION * middle:
            break
    return median(measurements)


def hit_count(subject: Subject, descent: Descent, target: str, budget: float) -> dict[str, Tensor]:
    """Go down until a budget of parameters or multiply-accumulates is met, exactly.

    Each step of the search is predicted without looking at a weight. Only what is found is counted in full; where
    constants of the removed channels cost something more, the search goes on with a budget that is smaller by as much.
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
    """Go down until the compacted model, measured beside the unpruned one, is as fast as the budget asks for.

    Args:
        subject: the model.
        descent: what goes, in order.
        budget: seconds.
        dense: seconds of the unpruned model, when it was measured.
    """
    lost = any(one.dense > one.group.size for pool in descent.pools for one in pool.ladders)
    now = reference(subject, "latency") if lost else dense  # the load may have changed, so prefer ratios

    def cost(count: int) -> float:
        if count == 0:
            return now
        small = subject.compacted(descent.keep(count))

        def ratios() -> list[float]:
            return [b / a for a, b in zip(*subject.seconds([subject.model, small]), strict=True)]

        return now * steady(ratios)

    return descent.keep(smallest(cost, len(descent), budget, TOLERANCE * budget))


def hit_channels(parts: Sequence[tuple[float, Pool]], fraction: float) -> dict[str, Tensor]:
    """Remove of each pool its amount times a fraction, rounded down."""
    kept: dict[str, Tensor] = {}
    for amount, pool in parts:
        kept |= kept_after(pool, pool.count(amount * fraction))
    return kept


def check_target(target: str, amount: Any, budget: float | None) -> None:
    """Refuse targets that are none.

    Raises:
        MisconfigurationException: names the argument.
    """
    if target not in TARGETS:
        raise MisconfigurationException(f"`target` is one of {', '.join(TARGETS)}, got {target!r}.")
    if target != "channels" and isinstance(amount, Mapping):
        raise MisconfigurationException(
            f"`amount` by pattern goes with `target='channels'` only. With `target={target!r}` it is one fraction of "
            "the whole model; `max_amount` takes patterns, and limits what each layer loses."
        )
    if budget is None:
        return
    if target == "channels":
        raise MisconfigurationException("`budget` goes with `target` 'latency', 'macs' or 'params'; give `amount`.")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise MisconfigurationException(f"`budget` is a number of {UNITS[target]} above 0, got {budget!r}.")
