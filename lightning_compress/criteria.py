"""How important each unit of a dependency group is: plain functions, one score per unit, the lowest go first."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine import Group
from lightning_compress.packages import MisconfigurationException


class Criterion(Protocol):
    """A function that scores the units of a group."""

    def __call__(self, group: Group, parameter: Callable[[str], Tensor]) -> Tensor:
        """Scores of shape ``(group.size,)``; ``parameter`` gives a parameter by its name."""


def l1(group: Group, parameter: Callable[[str], Tensor]) -> Tensor:
    r"""Sum of absolute weights that put a unit out, :math:`s_u = \sum_{w \to u} |w|`.

    Args:
        group: the dependency group.
        parameter: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    return _sum_over_units(group, parameter, torch.abs)


def l2(group: Group, parameter: Callable[[str], Tensor]) -> Tensor:
    r"""Euclidean norm of the weights that put a unit out, :math:`s_u = \sqrt{\sum_{w \to u} w^2}`.

    Args:
        group: the dependency group.
        parameter: gives a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    return _sum_over_units(group, parameter, torch.square).sqrt()


def random(group: Group, parameter: Callable[[str], Tensor], *, seed: int = 0) -> Tensor:
    """Uniform scores, the same for each call with the same seed and group, whatever the global random state.

    Args:
        group: the dependency group.
        parameter: gives a parameter by its full name.
        seed: number from which, with the group's name, the scores follow.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{group.name}".encode()))
    return torch.rand(group.size, generator=generator).to(parameter(group.members[0].parameter).device)


def _sum_over_units(group: Group, parameter: Callable[[str], Tensor], value: Callable[[Tensor], Tensor]) -> Tensor:
    scores: Tensor | None = None
    for member in group.members:
        weight = parameter(member.parameter).detach()
        if member.role != "out" or weight.ndim < 2:
            continue
        if scores is None:
            scores = torch.zeros(group.size + 1, device=weight.device)
        units = member.units.to(weight.device)
        units = units.reshape((1,) * (weight.ndim - units.ndim) + tuple(units.shape))
        # Sum what the unit does not depend on first: the rest is small, and no two additions meet in one place there.
        free = [d for d in range(weight.ndim) if units.shape[d] == 1]
        values = value(weight.float())
        values = values.sum(free, keepdim=True) if free else values
        index = torch.where(units < 0, group.size, units).expand_as(values)
        scores.index_add_(0, index.reshape(-1), values.reshape(-1))
    if scores is None:
        raise MisconfigurationException(f"Group `{group.name}` has no weight that puts its channels out.")
    return scores[: group.size]


CRITERIA: dict[str, Criterion] = {"l1": l1, "l2": l2, "random": random}


def resolve(criterion: str | Criterion, seed: int = 0) -> Criterion:
    """The function behind a name, an import path or a callable.

    Args:
        criterion: ``"l1"``, ``"l2"``, ``"random"``, an import path such as ``"my.module.function"``, or a function.
        seed: seed of ``"random"``.

    Returns:
        A function of a group and a parameter getter.

    Raises:
        MisconfigurationException: if there is no such function.

    Example:
        >>> resolve("l2") is l2, resolve("lightning_compress.criteria.l1") is l1
        (True, True)
    """
    if callable(criterion):
        return criterion
    if criterion == "random":
        return partial(random, seed=seed)
    if criterion in CRITERIA:
        return CRITERIA[criterion]
    return _imported(criterion)


def _imported(path: str) -> Criterion:
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    try:
        function: Criterion = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MisconfigurationException(
            f"`criterion={path!r}` is neither one of {', '.join(sorted(CRITERIA))} nor the import path of a function."
        ) from error
    return function


def score(criterion: Criterion, group: Group, parameter: Callable[[str], Tensor]) -> Tensor:
    """Scores of a group, checked.

    Args:
        criterion: function that scores.
        group: the dependency group.
        parameter: gives a parameter by its full name.

    Returns:
        Finite scores of shape ``(group.size,)``.

    Raises:
        MisconfigurationException: if the criterion returns another shape, or NaN or infinite scores.
    """
    scores = criterion(group, parameter)
    if tuple(scores.shape) != (group.size,):
        raise MisconfigurationException(
            f"The criterion gives scores of shape {tuple(scores.shape)} for group `{group.name}`, not ({group.size},)."
        )
    if not torch.isfinite(scores).all():
        raise MisconfigurationException(
            f"The criterion gives NaN or infinite scores for group `{group.name}`. Has the training diverged?"
        )
    return scores
