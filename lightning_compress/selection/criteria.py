r"""How important each unit of a dependency group is: plain functions, one score per unit, the lowest go first.

A criterion takes a group and the :class:`~lightning_compress.selection.evidence.Evidence`, and returns scores of shape
``(size,)``, or None for a group that it cannot score, which then stays whole. Criteria are composed by
:func:`normalized`, :func:`weighted` and :func:`product`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from engine import Group, sensitivity
from engine.sensitivity import unit_rows, unit_sums
from lightning_compress.selection.evidence import Evidence
from lightning_compress.selection.normalizers import NORMALIZERS, Normalizer, among_kept, lamp_scores
from lightning_compress.trainer.imports import imported
from lightning_compress.trainer.packages import MisconfigurationException


class Criterion(Protocol):
    """A function that scores the units of a group."""

    def __call__(self, group: Group, evidence: Evidence, /) -> Tensor | None:
        """Scores of shape ``(group.size,)``, or None; ``evidence(name)`` gives a parameter."""


CriterionSpec = str | Sequence[str] | Mapping[str, float] | Criterion


def gathering(*kinds: str) -> Callable[[Any], Any]:
    """Mark a criterion that needs statistics.

    Args:
        kinds: ``"loss_change"``, ``"squared_change"``, ``"activity"`` for ``active`` and ``magnitude``, or
            ``"reconstruction"``, which is computed at each pruning.

    Example:
        >>> @gathering("activity")
        ... def liveliest(group, evidence):
        ...     return evidence.statistic("magnitude", group)
        >>> sorted(needs(liveliest))
        ['activity']
    """

    def mark(criterion: Any) -> Any:
        criterion.gathers = frozenset(kinds)
        return criterion

    return mark


def needs(criterion: Criterion) -> frozenset[str]:
    """Kinds of statistics that a criterion needs."""
    kinds: frozenset[str] = getattr(criterion, "gathers", frozenset())
    return kinds


def l1(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Sum of absolute weights that put a unit out, :math:`s_u = \sum_{w \to u} |w|`.

    Args:
        group: the dependency group.
        evidence: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.

    Li et al., "Pruning Filters for Efficient ConvNets", 2017.
    """
    return sensitivity.l1(_rows(group, evidence))


def l2(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Euclidean norm of the weights that put a unit out, :math:`s_u = \sqrt{\sum_{w \to u} w^2}`.

    Args:
        group: the dependency group.
        evidence: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    return sensitivity.l2(_rows(group, evidence))


def fpgm(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Distance to the other units, :math:`s_u = \sum_v \lVert w_u - w_v \rVert_2`; masked ones are not neighbours.

    Args:
        group: the dependency group.
        evidence: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.

    He et al., "Filter Pruning via Geometric Median", 2019.
    """
    rows = _rows(group, evidence)
    return among_kept(rows, group, evidence, sensitivity.fpgm)


def bn_scale(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Size of the norms' scales, :math:`s_u = \sum_{\gamma \in u} |\gamma|`; None for a group without a norm.

    Args:
        group: the dependency group.
        evidence: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.

    Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", 2017.
    """
    scales = [member for member in group.members if member.role == "norm" and not is_shift(member.parameter)]
    sums = [unit_sums(evidence(m.parameter).detach().float().abs(), m.units, group.size) for m in scales]
    return torch.stack(sums).sum(0) if sums else None


def is_shift(parameter: str) -> bool:
    """Whether a parameter of a norm is its shift, by its name.

    Example:
        >>> is_shift("bn.bias"), is_shift("bn.weight")
        (True, False)
    """
    return parameter.rpartition(".")[2] == "bias"


def lamp(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Share of what would be left, :math:`s_u = w_u^2 / \sum_{v: w_v^2 \ge w_u^2} w_v^2`, comparable among groups.

    Args:
        group: the dependency group.
        evidence: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)`` in (0, 1], on the device of the parameters.

    Lee et al., "Layer-adaptive Sparsity for the Magnitude-based Pruning", 2021, for units in place of single weights.
    """
    return lamp_scores(sensitivity.l2(_rows(group, evidence)).square())


@gathering("loss_change")
def taylor(group: Group, evidence: Evidence) -> Tensor | None:
    r"""First-order estimate of what zeroing a unit does to the loss, :math:`s_u = E (\sum_{p \in u} g_p w_p)^2`.

    Args:
        group: the dependency group.
        evidence: holds what was gathered over the training steps.

    Returns:
        Scores of shape ``(group.size,)``, or None for a group without gradients.

    Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019.
    """
    return evidence.statistic("loss_change", group)


@gathering("activity")
def apoz(group: Group, evidence: Evidence) -> Tensor | None:
    """Fraction of values above 0 where a unit is read: one minus its average percentage of zeros.

    Args:
        group: the dependency group.
        evidence: holds what was gathered over the training steps.

    Returns:
        Scores of shape ``(group.size,)`` up to a common factor, or None for a group that no layer reads.

    Hu et al., "Network Trimming", 2016.
    """
    return evidence.statistic("active", group)


@gathering("activity")
def mean_activation(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Mean of :math:`|x_u|` where a unit is read.

    Args:
        group: the dependency group.
        evidence: holds what was gathered over the training steps.

    Returns:
        Scores of shape ``(group.size,)`` up to a common factor, or None for a group that no layer reads.

    Molchanov et al., "Pruning Convolutional Neural Networks for Resource Efficient Inference", 2017.
    """
    return evidence.statistic("magnitude", group)


@gathering("squared_change")
def fisher(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Second-order estimate of what zeroing a unit does to the loss, :math:`s_u = E \sum_{p \in u} (g_p w_p)^2`.

    Args:
        group: the dependency group.
        evidence: holds what was gathered over the training steps.

    Returns:
        Scores of shape ``(group.size,)``, or None for a group without gradients.

    Theis et al., "Faster gaze prediction with dense networks and Fisher pruning", 2018.
    """
    return evidence.statistic("squared_change", group)


@gathering("reconstruction")
def reconstruction(group: Group, evidence: Evidence) -> Tensor | None:
    """What is lost with a unit when the others make up for it: `engine.reconstruction_losses`; None where unknown."""
    return evidence.statistic("reconstruction", group)


def random(group: Group, evidence: Evidence, *, seed: int = 0) -> Tensor | None:
    """Uniform scores, the same for each call with the same seed and unit, whatever the global random state.

    Args:
        group: the dependency group.
        evidence: gives a parameter by its full name.
        seed: number from which, with the group's name and the unit's place in the unpruned model, a score follows.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{group.name}".encode()))
    present = evidence.present.get(group.name, torch.ones(group.size, dtype=torch.bool))
    return torch.rand(len(present), generator=generator)[present].to(evidence(group.members[0].parameter).device)


def _rows(group: Group, evidence: Evidence) -> Tensor:
    rows = unit_rows(group, evidence)
    if not rows.shape[1]:
        raise MisconfigurationException(f"Group `{group.name}` has no weight that puts its channels out.")
    return rows


CRITERIA: dict[str, Criterion] = {
    "apoz": apoz,
    "bn_scale": bn_scale,
    "fisher": fisher,
    "fpgm": fpgm,
    "l1": l1,
    "l2": l2,
    "lamp": lamp,
    "mean_activation": mean_activation,
    "random": random,
    "reconstruction": reconstruction,
    "taylor": taylor,
}

# Sums over weights or activations grow with the layer: between groups they are compared relative to the group's mean.
RELATIVE = (fpgm, l1, l2, mean_activation, reconstruction)


def normalized(criterion: Criterion, by: str | Normalizer) -> Criterion:
    """A criterion whose scores are made comparable between groups; what is masked already does not count.

    Args:
        criterion: the criterion.
        by: ``"mean"``, ``"max"``, ``"sum"``, ``"norm"``, ``"standard"`` (zero mean, unit deviation), ``"rank"``,
            ``"lamp"``, ``"none"``, an import path, or a function of the scores.

    Raises:
        MisconfigurationException: if there is no such normalisation.
    """
    function = by if callable(by) else NORMALIZERS.get(by) or imported(by, "normalize", NORMALIZERS)
    marked: Criterion = gathering(*needs(criterion))(partial(_normalized, criterion=criterion, function=function))
    return marked


def _normalized(group: Group, evidence: Evidence, criterion: Criterion, function: Normalizer) -> Tensor | None:
    scores = criterion(group, evidence)
    return None if scores is None else among_kept(scores, group, evidence, function)


def weighted(parts: Iterable[tuple[float, Criterion]]) -> Criterion:
    r"""The sum :math:`\sum_i a_i s_i` of criteria; None where one of them is None.

    Args:
        parts: factors and criteria.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
        >>> group = engine.dependency_groups(net, torch.zeros(1, 1))[0]
        >>> _ = net[0].weight.data.copy_(torch.tensor([[2.0], [-3.0]]))
        >>> weighted([(1.0, l1), (0.5, l2)])(group, Evidence(net.get_parameter))
        tensor([3.0000, 4.5000], dtype=torch.float64)
    """
    factors, criteria = zip(*parts, strict=True)
    return _combined(criteria, partial(_sum, factors=factors))


def _sum(scores: Sequence[Tensor], factors: Sequence[float]) -> Any:
    return sum(factor * values for factor, values in zip(factors, scores, strict=True))


def product(*criteria: Criterion) -> Criterion:
    r"""The product :math:`\prod_i s_i` of criteria; None where one of them is None."""
    return _combined(criteria, math.prod)


# What puts criteria together is not a closure: strategies that spawn processes pickle it.
def _combined(criteria: Sequence[Criterion], combine: Callable[[list[Tensor]], Any]) -> Criterion:
    marked: Criterion = gathering(*frozenset().union(*map(needs, criteria)))(
        partial(_together, criteria=tuple(criteria), combine=combine)
    )
    return marked


def _together(
    group: Group, evidence: Evidence, criteria: Sequence[Criterion], combine: Callable[[list[Tensor]], Tensor]
) -> Tensor | None:
    scores = [criterion(group, evidence) for criterion in criteria]
    present_scores = [s.double() for s in scores if s is not None]
    return (
        combine([s.to(present_scores[0].device) for s in present_scores])
        if len(present_scores) == len(scores)
        else None
    )


def resolve(criterion: CriterionSpec, seed: int = 0, normalize: str | Normalizer | None = None) -> Criterion:
    """The function behind a specification.

    Args:
        criterion: a name, an import path such as ``"package.module:function"``, a function, several names that count
            alike, or names with factors. Several are each normalised, then summed.
        seed: seed of ``"random"``.
        normalize: see :func:`normalized`; by default ``"mean"`` for what grows with the size of a layer and for each
            of several, else none.

    Returns:
        A function of a group and the evidence.

    Raises:
        MisconfigurationException: if there is no such function or normalisation.

    Example:
        >>> resolve("lamp") is lamp, resolve(lamp) is lamp, sorted(needs(resolve(["l1", "taylor"])))
        (True, True, ['loss_change'])
    """
    if not callable(criterion) and not isinstance(criterion, str):
        factors = _factors(criterion)
        return weighted((f, normalized(_named(name, seed), normalize or "mean")) for name, f in factors.items())
    base_criterion = _named(criterion, seed)
    by = normalize or ("mean" if any(base_criterion is function for function in RELATIVE) else None)
    return base_criterion if by is None else normalized(base_criterion, by)


def _factors(criterion: Any) -> dict[str, float]:
    factors = dict(criterion) if isinstance(criterion, Mapping) else dict.fromkeys(criterion, 1.0)
    if not factors or any(isinstance(f, bool) or not isinstance(f, (int, float)) for f in factors.values()):
        raise MisconfigurationException(f"`criterion` holds names, or names with factors; got {criterion!r}.")
    return factors


def _named(criterion: Any, seed: int) -> Criterion:
    if callable(criterion):
        function: Criterion = criterion
        return function
    if criterion == "random":
        return partial(random, seed=seed)
    return CRITERIA[criterion] if criterion in CRITERIA else imported(criterion, "criterion", CRITERIA)


def score(criterion: Criterion, group: Group, evidence: Evidence) -> Tensor | None:
    """Scores of a group, checked.

    Args:
        criterion: function that scores.
        group: the dependency group.
        evidence: what is known of the model.

    Returns:
        Finite scores of shape ``(group.size,)``, or None where the criterion has none for the group.

    Raises:
        MisconfigurationException: if the criterion returns another shape, or NaN or infinite scores.
    """
    scores = criterion(group, evidence)
    if scores is None:
        return None
    if tuple(scores.shape) != (group.size,):
        raise MisconfigurationException(
            f"The criterion gives scores of shape {tuple(scores.shape)} for group `{group.name}`, not ({group.size},)."
        )
    if not torch.isfinite(scores).all():
        raise MisconfigurationException(
            f"The criterion gives NaN or infinite scores for group `{group.name}`. Has the training diverged?"
        )
    return scores
