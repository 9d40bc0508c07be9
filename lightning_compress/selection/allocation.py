"""Allocation of pruning amounts to layers, from a sensitivity analysis or by simulated annealing.

Both return amounts for ``ChannelPruning(amount={pattern: amount})``: one fraction per dependency group, named by its
first layer, such that the compacted model meets a target exactly.
"""

from __future__ import annotations

import glob
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import engine
from engine import progress
from engine.bounds import check_number
from engine.cost import Predictor
from engine.sensitivity import masked
from lightning_compress.selection import amounts as selection
from lightning_compress.selection import criteria, scoring, targets
from lightning_compress.selection.evidence import Evidence
from lightning_compress.selection.ladders import Ladder, Limits, ladder
from lightning_compress.trainer.packages import MisconfigurationException

Amounts = dict[str, float]


class Allocator:
    """Pruning amounts of a model's groups, and the cost of the model under them.

    Args:
        model: the model, which is not changed.
        example_input: example input of the model.
        amount: fraction of the target to remove, in [0, 1].
        target: what the amount is a fraction of: ``"channels"``, ``"macs"`` or ``"params"``.
        criterion: criterion that ranks the channels of a group.
        limits: limits of each group.
        layers: name patterns of the layers to prune; all by default.
        exclude: name patterns of layers that are not pruned.

    Raises:
        MisconfigurationException: for an invalid argument, or if the target cannot be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        amount: float = 0.5,
        target: str = "macs",
        criterion: criteria.CriterionSpec = "l1",
        limits: Limits | None = None,
        layers: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> None:
        selection.check_amount(amount)
        if target not in ("channels", "macs", "params"):
            raise MisconfigurationException(f"`target` must be 'channels', 'macs' or 'params' here, got {target!r}.")
        graph = engine.trace(model, example_input)
        groups = engine.dependency_groups(model, example_input, graph=graph)
        chosen = selection.amounts(groups, 1.0, selection.as_patterns(layers), selection.as_patterns(exclude))
        score, evidence = scoring.resolve(criterion), Evidence(model.get_parameter)
        scored = {g.name: scoring.score(score, g, evidence) for g in groups if g.name in chosen}
        self.groups = groups
        self.ladders: dict[str, Ladder] = {
            g.name: ladder(g, scores, None, limits)
            for g in groups
            for scores in [scored.get(g.name)]
            if scores is not None
        }
        self._position = ("macs", "params").index(target) if target != "channels" else None
        self._predict = Predictor(model, graph, groups)
        self.budget = (1.0 - amount) * self.cost(dict.fromkeys(self.ladders, 0.0))
        lowest = self.cost(dict.fromkeys(self.ladders, 1.0))
        if lowest > self.budget:
            raise MisconfigurationException(
                f"`amount={amount}` of the {target} cannot be reached: at least {lowest:,.0f} remain, but the target "
                f"is {self.budget:,.0f}.{selection.layers_that_stay(groups)}"
            )

    def keep(self, amounts: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the units that each group keeps under amounts, by group name."""
        return {name: one.keep(one.stop_at(amounts[name])) for name, one in self.ladders.items()}

    def cost(self, amounts: Mapping[str, float]) -> float:
        """Return the cost of the model under amounts, in units of the target."""
        keep = self.keep(amounts)
        if self._position is None:
            return float(sum(int(kept.sum()) for kept in keep.values()))
        return float(self._predict(keep)[self._position])

    def meet(self, amounts: Callable[[float], Mapping[str, float]], steps: int = 4000) -> Amounts:
        """Find the smallest amounts that meet the target in a family that grows with a number in [0, 1].

        The amounts returned are those of whole units.
        """
        step = targets.smallest(lambda n: self.cost(amounts(n / steps)), steps, self.budget)
        return self._exact(amounts(step / steps))

    def _exact(self, amounts: Mapping[str, float]) -> Amounts:
        return {name: one.removed(one.stop_at(amounts[name])) / one.dense for name, one in self.ladders.items()}

    def masks(self, amounts: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the masks under amounts, by full parameter name."""
        masks_by_module = engine.group_masks(self.groups, self.keep(amounts))
        return {f"{m}.{key}" if m else key: mask for m, own in masks_by_module.items() for key, mask in own.items()}


def patterns(amounts: Mapping[str, float], groups: Sequence[engine.Group]) -> Amounts:
    """Convert amounts by group to amounts by name pattern of the group's first layer, for `ChannelPruning`.

    Raises:
        MisconfigurationException: if a layer feeds several groups, which its name cannot distinguish.
    """
    first = {group.name: group.layers[0] for group in groups}
    pattern_amounts: Amounts = {}
    for name, amount in amounts.items():
        pattern = glob.escape(first[name])
        if pattern in pattern_amounts:
            raise MisconfigurationException(
                f"The layer `{first[name]}` feeds several groups of channels, which cannot have separate amounts. "
                f"Exclude it, as in `exclude={first[name]!r}`."
            )
        pattern_amounts[pattern] = amount
    return pattern_amounts


def allocate_by_sensitivity(
    table: engine.SensitivityTable,
    model: nn.Module,
    example_input: Any,
    amount: float = 0.5,
    target: str = "macs",
    better: str | None = None,
    *,
    max_amount: float = 1.0,
    round_to: int = 1,
    minimum: int = 1,
    exclude: str | Sequence[str] | None = None,
) -> Amounts:
    r"""Allocate amounts at which each group alone degrades the metric equally, as small as the target allows.

    With :math:`l_g(a)` the degradation of the metric at amount a, interpolated linearly in the table, each group gets
    :math:`a_g(b) = \max \{a : l_g(a') \le b \; \forall a' \le a\}`, where b is the smallest number with which the model
    meets the target. Amounts never exceed the largest sparsity of the table.

    Args:
        table: result of `engine.SensitivityAnalysis(…, group=True)` or `analyze_sensitivity(…, group=True)`; groups
            without a layer in the table are not pruned.
        model: the model.
        example_input: example input of the model.
        amount: fraction of the target to remove, in [0, 1].
        target: what it is a fraction of: ``"channels"``, ``"macs"`` or ``"params"``.
        better: whether ``"higher"`` or ``"lower"`` metrics are better; None: see `engine.SensitivityTable.suggest`.
        max_amount: maximum fraction of a group to remove.
        round_to: widths are multiples of this.
        minimum: minimum remaining width.
        exclude: name patterns of layers that are not pruned.

    Returns:
        Amounts by layer name pattern, for ``ChannelPruning(amount=…)``.

    Raises:
        MisconfigurationException: if the target cannot be reached with the table's sparsities.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> table = engine.SensitivityTable({"0": {0.5: 0.9, 0.75: 0.9}, "2": {0.5: 0.1, 0.75: 0.0}}, [0.5, 0.75], 0.9)
        >>> allocate_by_sensitivity(table, net, torch.zeros(1, 2), amount=0.4, target="channels")
        {'0': 0.75, '2': 0.125}
    """
    sign = 1.0 if table.direction(better) == "lower" else -1.0
    allocator = Allocator(
        model, example_input, 0.0, target, limits=Limits(round_to, minimum, max_amount), exclude=exclude
    )
    curves = {name: _curves(one.group, table, sign) for name, one in allocator.ladders.items()}
    losses = [loss for several in curves.values() for curve in several for _, loss in curve if math.isfinite(loss)]
    most = max(losses, default=0.0)
    allocator.budget *= 1.0 - amount

    def amounts(part: float) -> Amounts:
        # The square spends half of the steps on the lowest quarter of losses, which most layers have.
        budget = part**2 * most
        return {name: min((_reach(c, budget) for c in several), default=0.0) for name, several in curves.items()}

    group_amounts = allocator.meet(amounts)
    remaining = allocator.cost(group_amounts)
    if remaining > allocator.budget:
        raise MisconfigurationException(
            f"`amount={amount}` of the {target} cannot be reached with this table: {remaining:,.0f} remain at its "
            f"largest sparsities, but the target is {allocator.budget:,.0f}. Analyse more layers or larger sparsities."
        )
    return patterns(group_amounts, allocator.groups)


Curve = list[tuple[float, float]]


def _curves(group: engine.Group, table: engine.SensitivityTable, sign: float) -> list[Curve]:
    """Return a non-decreasing curve of (sparsity, loss) from (0, 0) for each layer of a group."""
    curves = []
    for layer in group.layers:
        if layer in table:
            curve, worst = [(0.0, 0.0)], 0.0
            for sparsity in sorted(table[layer]):
                worst = max(worst, sign * (table[layer][sparsity] - table.baseline))
                curve.append((sparsity, worst))
            curves.append(curve)
    return curves


def _reach(curve: Curve, budget: float) -> float:
    reached = 0.0
    for (start, low), (end, high) in zip(curve[:-1], curve[1:], strict=True):
        if high > budget:
            return start + (end - start) * (budget - low) / (high - low) if math.isfinite(high) else start
        reached = end
    return reached


@dataclass(frozen=True)
class Annealing:
    """Result of simulated annealing.

    Attributes:
        amounts: the best amounts, by layer name pattern, for ``ChannelPruning(amount=…)``.
        metric: their metric.
        history: the metric of each candidate, and whether it was accepted.
    """

    amounts: Amounts
    metric: float
    history: tuple[tuple[float, bool], ...]


def anneal_amounts(
    model: nn.Module,
    example_input: Any,
    evaluate: Callable[[nn.Module], float],
    amount: float = 0.5,
    target: str = "macs",
    better: str = "higher",
    *,
    criterion: criteria.CriterionSpec = "l1",
    steps: int = 50,
    perturbation: float = 0.35,
    max_amount: float = 0.95,
    round_to: int = 1,
    minimum: int = 1,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Annealing:
    r"""Allocate amounts by simulated annealing.

    Each candidate is a random change of the amounts, scaled so that the model meets the target. A candidate that is
    worse by Δ is accepted with probability :math:`e^{-\Delta / T}`. The temperature T starts at the degradation of the
    first candidate and cools geometrically to a hundredth of it; the changes shrink with it.

    Args:
        model: the model; it is masked in place during each evaluation.
        example_input: example input of the model.
        evaluate: returns the metric of the masked model, such as the accuracy on some validation batches; see
            `validation_metric` for the validation of a Trainer.
        amount: fraction of the target to remove, in [0, 1].
        target: what it is a fraction of: ``"channels"``, ``"macs"`` or ``"params"``.
        better: whether ``"higher"`` (accuracy) or ``"lower"`` (loss) metrics are better.
        criterion: criterion that ranks the channels of a group.
        steps: number of candidates.
        perturbation: maximum change of a group's amount in the first step.
        max_amount: maximum fraction of a group to remove.
        round_to: widths are multiples of this.
        minimum: minimum remaining width.
        layers: name patterns of the layers to prune; all by default.
        exclude: name patterns of layers that are not pruned.
        seed: seed of the changes.

    Returns:
        The best amounts, by layer name pattern, their metric, and the history.

    Raises:
        MisconfigurationException: for an invalid argument, or if the target cannot be reached.

    Liu et al., "AutoCompress", 2020; NNI: ``SimulatedAnnealingPruner``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> def size(model):
        ...     return float(sum(p.detach().abs().sum() for p in model.parameters()))
        >>> sorted(anneal_amounts(net, torch.ones(4, 2), size, amount=0.3, target="params", steps=3).amounts)
        ['0', '2']
    """
    if better not in ("higher", "lower"):
        raise MisconfigurationException(f"`better` must be 'higher' or 'lower', got {better!r}.")
    check_number("steps", steps, 1, whole=True, what="a number of candidates", error=MisconfigurationException)
    limits = Limits(round_to, minimum, max_amount)
    allocator = Allocator(model, example_input, amount, target, criterion, limits, layers, exclude)
    walk = _Walk(allocator, model, evaluate, 1.0 if better == "higher" else -1.0, random.Random(seed))
    with progress.bar(steps, "Annealing", "candidates") as bar:
        for step in range(steps):
            walk.step(0.01 ** (step / steps), perturbation)
            if bar is not None:
                bar.update(1)
    return Annealing(patterns(walk.best, allocator.groups), walk.metric(walk.best), tuple(walk.history))


class _Walk:
    """State of the annealing: the current and the best amounts."""

    def __init__(
        self,
        allocator: Allocator,
        model: nn.Module,
        evaluate: Callable[[nn.Module], float],
        sign: float,
        generator: random.Random,
    ) -> None:
        self._allocator, self._model, self._evaluate = allocator, model, evaluate
        self._sign, self._random = sign, generator
        self._metrics: dict[tuple[float, ...], float] = {}
        self.history: list[tuple[float, bool]] = []
        self._current = allocator.meet(lambda part: dict.fromkeys(allocator.ladders, part))
        self.best = self._current
        loss = self.metric(dict.fromkeys(allocator.ladders, 0.0)) - self.metric(self._current)
        self._scale = max(abs(loss), 1e-12)

    def metric(self, amounts: Amounts) -> float:
        """Return the metric under amounts, evaluating each combination once."""
        key = tuple(amounts.values())
        if key not in self._metrics:
            with masked(self._model, self._allocator.masks(amounts)):
                self._metrics[key] = float(self._evaluate(self._model))
            if math.isnan(self._metrics[key]):
                raise MisconfigurationException("`evaluate` returned NaN. It must return a number for any model.")
        return self._metrics[key]

    def step(self, heat: float, perturbation: float) -> None:
        """Try a change; ``heat`` is the relative temperature, which falls from 1 to 0."""
        candidate = self._candidate(heat * perturbation)
        gain = self._sign * (self.metric(candidate) - self.metric(self._current))
        accepted = gain >= 0 or self._random.random() < math.exp(gain / (heat * self._scale))
        self.history.append((self.metric(candidate), accepted))
        if accepted:
            self._current = candidate
        if self._sign * (self.metric(candidate) - self.metric(self.best)) > 0:
            self.best = candidate

    def _candidate(self, size: float) -> Amounts:
        moved = {name: a + self._random.uniform(-size, size) for name, a in self._current.items()}
        wanted = {name: min(max(a, 0.0), 1.0) + 1e-3 for name, a in moved.items()}
        # The family runs from pruning nothing through the candidate to pruning everything, so it meets the target.
        return self._allocator.meet(lambda part: {n: _scaled(a, 2.0 * part) for n, a in wanted.items()})


def _scaled(amount: float, factor: float) -> float:
    return amount * factor if factor <= 1.0 else min(1.0, amount + (1.0 - amount) * (factor - 1.0))
