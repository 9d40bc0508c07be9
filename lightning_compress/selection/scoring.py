"""Combination of criteria: lookup by name, normalisation between groups, sums and products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine import Group
from engine.bounds import calling, check_number, is_list, is_number
from lightning_compress.selection.criteria import (
    CRITERIA,
    RELATIVE,
    Criterion,
    CriterionSpec,
    gathering,
    needs,
    random,
)
from lightning_compress.selection.evidence import Evidence
from lightning_compress.selection.normalizers import NORMALIZERS, Normalizer, among_kept
from lightning_compress.trainer.imports import check_takes, imported
from lightning_compress.trainer.packages import MisconfigurationException


def normalized(criterion: Criterion, by: str | Normalizer) -> Criterion:
    """Normalise the scores of a criterion to compare groups, ignoring masked units.

    Args:
        criterion: the criterion.
        by: ``"mean"``, ``"max"``, ``"sum"``, ``"norm"``, ``"standard"`` (zero mean, unit deviation), ``"rank"``,
            ``"lamp"``, ``"none"``, an import path, or a function of the scores.

    Raises:
        MisconfigurationException: for an unknown normalisation.
    """
    function = by if callable(by) else NORMALIZERS.get(by) or imported(by, "normalize", NORMALIZERS)
    marked: Criterion = gathering(*needs(criterion))(partial(_normalized, criterion=criterion, function=function))
    return marked


def _normalized(group: Group, evidence: Evidence, criterion: Criterion, function: Normalizer) -> Tensor | None:
    scores = criterion(group, evidence)
    return None if scores is None else among_kept(scores, group, evidence, function)


def weighted(parts: Iterable[tuple[float, Criterion]]) -> Criterion:
    r"""Sum criteria to :math:`\sum_i a_i s_i`; the sum is None if one of them is None.

    Args:
        parts: factors and criteria.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
        >>> group = engine.dependency_groups(net, torch.zeros(1, 1))[0]
        >>> _ = net[0].weight.data.copy_(torch.tensor([[2.0], [-3.0]]))
        >>> weighted([(1.0, CRITERIA["l1"]), (0.5, CRITERIA["l2"])])(group, Evidence(net.get_parameter))
        tensor([3.0000, 4.5000], dtype=torch.float64)
    """
    factors, criteria = zip(*parts, strict=True)
    return _combined(criteria, partial(_sum, factors=factors))


def _sum(scores: Sequence[Tensor], factors: Sequence[float]) -> Any:
    return sum(factor * values for factor, values in zip(factors, scores, strict=True))


def product(*criteria: Criterion) -> Criterion:
    r"""Multiply criteria to :math:`\prod_i s_i`; the product is None if one of them is None."""
    return _combined(criteria, math.prod)


# Not a closure, because strategies that spawn processes pickle combined criteria.
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
    """Resolve a specification to a function.

    Args:
        criterion: a name, an import path such as ``"package.module:function"``, a function, several names, or names
            with factors. Several criteria are normalised and summed.
        seed: seed of ``"random"``.
        normalize: see :func:`normalized`; by default ``"mean"`` for each of several criteria and for criteria that grow
            with the size of a layer, else none.

    Returns:
        A function of a group and the evidence.

    Raises:
        MisconfigurationException: for an unknown criterion or normalisation.

    Example:
        >>> resolve("lamp") is CRITERIA["lamp"], sorted(needs(resolve(["l1", "taylor"])))
        (True, ['loss_change'])
    """
    check_number("seed", seed, whole=True, error=MisconfigurationException)
    if not callable(criterion) and not isinstance(criterion, str):
        factors = _factors(criterion)
        return weighted((f, normalized(_named(name, seed), normalize or "mean")) for name, f in factors.items())
    base_criterion = _named(criterion, seed)
    by = normalize or ("mean" if any(base_criterion is function for function in RELATIVE) else None)
    return base_criterion if by is None else normalized(base_criterion, by)


def _factors(criterion: Any) -> dict[str, float]:
    names = criterion if is_list(criterion) else ()
    try:
        factors = dict(criterion) if isinstance(criterion, Mapping) else dict.fromkeys(names, 1.0)
    except TypeError:  # a list among the names
        factors = {}
    if not factors or not all(is_number(f) and math.isfinite(f) for f in factors.values()):
        raise MisconfigurationException(f"`criterion` must hold names, or names with factors; got {criterion!r}.")
    return factors


def _named(criterion: Any, seed: int) -> Criterion:
    if criterion == "random":
        return partial(random, seed=seed)
    if isinstance(criterion, str) and criterion in CRITERIA:
        return CRITERIA[criterion]
    function: Criterion = criterion if callable(criterion) else imported(criterion, "criterion", CRITERIA)
    check_takes(function, "criterion", ["a group", "an `Evidence`"])
    return function


def score(criterion: Criterion, group: Group, evidence: Evidence) -> Tensor | None:
    """Score a group and check the result.

    Args:
        criterion: the criterion.
        group: the dependency group.
        evidence: inputs of the criterion.

    Returns:
        Finite scores of shape ``(group.size,)``, or None if the criterion cannot score the group.

    Raises:
        MisconfigurationException: if the criterion returns another shape, or NaN or infinite scores.
    """
    with calling(f"The criterion for group `{group.name}`", MisconfigurationException):
        scores = criterion(group, evidence)
    if scores is None:
        return None
    if not isinstance(scores, Tensor):
        raise MisconfigurationException(
            f"The criterion returned {scores!r} for group `{group.name}`, neither None nor a tensor of shape "
            f"({group.size},)."
        )
    if tuple(scores.shape) != (group.size,):
        raise MisconfigurationException(
            f"The criterion returned shape {tuple(scores.shape)} for group `{group.name}`, not ({group.size},)."
        )
    if not torch.isfinite(scores).all():
        raise MisconfigurationException(
            f"The criterion returned NaN or infinite scores for group `{group.name}`. Did training diverge?"
        )
    return scores
