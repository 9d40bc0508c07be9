r"""Criteria: functions that score the units of a dependency group by importance. The lowest scores are pruned first.

A criterion takes a group and the :class:`~lightning_compress.selection.evidence.Evidence`, and returns scores of shape
``(size,)``, or None for a group that it cannot score, which is then not pruned. To add one, write a function and list
it in ``CRITERIA``; :mod:`~lightning_compress.selection.scoring` combines them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine import Group, sensitivity
from engine.sensitivity import unit_rows, unit_sums
from lightning_compress.selection.evidence import Evidence
from lightning_compress.selection.normalizers import among_kept, lamp_scores
from lightning_compress.trainer.packages import MisconfigurationException


class Criterion(Protocol):
    """A function that scores the units of a group."""

    def __call__(self, group: Group, evidence: Evidence, /) -> Tensor | None:
        """Return scores of shape ``(group.size,)``, or None; ``evidence(name)`` returns a parameter."""


CriterionSpec = str | Sequence[str] | Mapping[str, float] | Criterion


def gathering(*kinds: str) -> Callable[[Any], Any]:
    """Mark a criterion that needs statistics of training.

    Args:
        kinds: ``"loss_change"``, ``"squared_change"``, ``"activity"`` for ``active`` and ``magnitude``, or
            ``"reconstruction"``, which is computed at each pruning.

    Example:
        >>> @gathering("activity")
        ... def magnitude(group, evidence):
        ...     return evidence.statistic("magnitude", group)
        >>> sorted(needs(magnitude))
        ['activity']
    """

    def mark(criterion: Any) -> Any:
        criterion.gathers = frozenset(kinds)
        return criterion

    return mark


def needs(criterion: Criterion) -> frozenset[str]:
    """Return the kinds of statistics that a criterion needs."""
    kinds: frozenset[str] = getattr(criterion, "gathers", frozenset())
    return kinds


def l1(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Sum of the absolute weights that output a unit, :math:`s_u = \sum_{w \to u} |w|`.

    Args:
        group: the dependency group.
        evidence: returns a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.

    Li et al., "Pruning Filters for Efficient ConvNets", 2017.
    """
    return sensitivity.l1(_rows(group, evidence))


def l2(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Euclidean norm of the weights that output a unit, :math:`s_u = \sqrt{\sum_{w \to u} w^2}`.

    Args:
        group: the dependency group.
        evidence: returns a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    return sensitivity.l2(_rows(group, evidence))


def fpgm(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Distance to the other unmasked units, :math:`s_u = \sum_v \lVert w_u - w_v \rVert_2`.

    Args:
        group: the dependency group.
        evidence: returns a parameter by its full name.

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
        evidence: returns a parameter by its full name.

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
    r"""LAMP score, :math:`s_u = w_u^2 / \sum_{v: w_v^2 \ge w_u^2} w_v^2`, which is comparable between groups.

    Args:
        group: the dependency group.
        evidence: returns a parameter by its full name.

    Returns:
        Scores of shape ``(group.size,)`` in (0, 1], on the device of the parameters.

    Lee et al., "Layer-adaptive Sparsity for the Magnitude-based Pruning", 2021, for units instead of single weights.
    """
    return lamp_scores(sensitivity.l2(_rows(group, evidence)).square())


@gathering("loss_change")
def taylor(group: Group, evidence: Evidence) -> Tensor | None:
    r"""First-order estimate of the loss change of zeroing a unit, :math:`s_u = E (\sum_{p \in u} g_p w_p)^2`.

    Args:
        group: the dependency group.
        evidence: holds statistics of the training steps.

    Returns:
        Scores of shape ``(group.size,)``, or None for a group without gradients.

    Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019.
    """
    return evidence.statistic("loss_change", group)


@gathering("activity")
def apoz(group: Group, evidence: Evidence) -> Tensor | None:
    """Fraction of a unit's activations above 0, which is one minus its average percentage of zeros.

    Args:
        group: the dependency group.
        evidence: holds statistics of the training steps.

    Returns:
        Scores of shape ``(group.size,)`` up to a common factor, or None for a group that no layer reads.

    Hu et al., "Network Trimming", 2016.
    """
    return evidence.statistic("active", group)


@gathering("activity")
def mean_activation(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Mean of :math:`|x_u|` over the activations of a unit.

    Args:
        group: the dependency group.
        evidence: holds statistics of the training steps.

    Returns:
        Scores of shape ``(group.size,)`` up to a common factor, or None for a group that no layer reads.

    Molchanov et al., "Pruning Convolutional Neural Networks for Resource Efficient Inference", 2017.
    """
    return evidence.statistic("magnitude", group)


@gathering("squared_change")
def fisher(group: Group, evidence: Evidence) -> Tensor | None:
    r"""Second-order estimate of the loss change of zeroing a unit, :math:`s_u = E \sum_{p \in u} (g_p w_p)^2`.

    Args:
        group: the dependency group.
        evidence: holds statistics of the training steps.

    Returns:
        Scores of shape ``(group.size,)``, or None for a group without gradients.

    Theis et al., "Faster gaze prediction with dense networks and Fisher pruning", 2018.
    """
    return evidence.statistic("squared_change", group)


@gathering("reconstruction")
def reconstruction(group: Group, evidence: Evidence) -> Tensor | None:
    """Loss that remains when other units compensate for a unit (`engine.reconstruction_losses`); None if unknown."""
    return evidence.statistic("reconstruction", group)


def random(group: Group, evidence: Evidence, *, seed: int = 0) -> Tensor | None:
    """Uniform random scores that depend on the seed and the unit only, not on the global random state.

    Args:
        group: the dependency group.
        evidence: returns a parameter by its full name.
        seed: seed; the score also depends on the group's name and the unit's index in the unpruned model.

    Returns:
        Scores of shape ``(group.size,)``, on the device of the parameters.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{group.name}".encode()))
    present = evidence.present.get(group.name, torch.ones(group.size, dtype=torch.bool))
    return torch.rand(len(present), generator=generator)[present].to(evidence(group.members[0].parameter).device)


def _rows(group: Group, evidence: Evidence) -> Tensor:
    rows = unit_rows(group, evidence)
    if not rows.shape[1]:
        raise MisconfigurationException(f"Group `{group.name}` has no weight that produces its channels.")
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

# Sums over weights or activations grow with the layer, so groups are compared relative to their mean.
RELATIVE = (fpgm, l1, l2, mean_activation, reconstruction)
