"""Pruning amounts of groups by name pattern, and the units that masks keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from engine import Graph, Group, Member
from engine.bounds import as_names, is_number
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.steps import TRAINING

Masks = dict[str, dict[str, Tensor]]


def check_amount(amount: float | Mapping[str, float], name: str = "amount") -> None:
    """Check that amounts are fractions.

    Raises:
        MisconfigurationException: if an amount is outside [0, 1].

    Example:
        >>> check_amount({"layer1.*": 0.3, "*": 0.5})
    """
    as_names(name, tuple(amount) if isinstance(amount, Mapping) else None, MisconfigurationException)
    for value in amount.values() if isinstance(amount, Mapping) else (amount,):
        if not is_number(value) or not 0 <= value <= 1:
            raise MisconfigurationException(
                f"`{name}` must be a fraction in [0, 1], or fractions by pattern, got {value!r}."
            )


def as_patterns(patterns: str | Sequence[str] | None, name: str = "layers") -> tuple[str, ...]:
    """Convert one or several patterns to a tuple.

    Raises:
        MisconfigurationException: naming the argument, if it contains anything but text.

    Example:
        >>> as_patterns("conv*"), as_patterns(None)
        (('conv*',), ())
    """
    return as_names(name, patterns, MisconfigurationException)


def amounts(
    groups: Sequence[Group],
    amount: float | Mapping[str, float],
    layers: Sequence[str] = (),
    exclude: Sequence[str] = (),
    checks: bool = True,
) -> dict[str, float]:
    """Return the fraction of each group to remove.

    A group is included if any of its layers matches ``layers``, and excluded if any matches ``exclude``. Coupled layers
    lose the same channels, so the smallest amount of a group's layers applies.

    Args:
        groups: dependency groups; those with a ``reason`` are not pruned.
        amount: fraction in [0, 1], or fractions by name pattern; the first pattern that matches a layer applies.
        layers: name patterns (`fnmatch`) of the layers to prune; all if empty.
        exclude: name patterns of layers that are not pruned.
        checks: whether patterns have to match layers that can be pruned.

    Returns:
        ``{group name: fraction}`` of the groups to prune.

    Raises:
        MisconfigurationException: if a pattern matches no layer, or only layers that cannot be pruned.
    """
    by_pattern = dict(amount) if isinstance(amount, Mapping) else {"*": amount}
    chosen = [group for group in groups if not layers or _matches(group, layers)]
    if checks:
        check_patterns(groups, [*layers, *exclude, *(by_pattern if isinstance(amount, Mapping) else ())])
        check_prunable(chosen, layers)
    fractions = {
        group.name: smallest_amount(group, by_pattern)
        for group in chosen
        if not group.reason and not _matches(group, exclude)
    }
    return {name: value for name, value in fractions.items() if value is not None}


_OF_STEPS_ALONE = "is read by steps of the LightningModule alone, and stays unless `layers=` names it"


def keep_what_steps_read_alone(
    groups: Sequence[Group], graph: Graph, layers: Sequence[str], amount: float | Mapping[str, float] = 1.0
) -> list[Group]:
    """Freeze the groups that the model's forward does not read, unless a pattern names them.

    A teacher, a discriminator, a projection head, or a network that a validation measures with is not part of the
    network that becomes smaller, whether or not steps are traced.

    Args:
        groups: dependency groups.
        graph: of the model and its steps.
        layers, amount: as for `amounts`; an amount of the pattern ``"*"``, for all others, names nothing.

    Returns:
        The groups, some of them with a ``reason``.
    """
    read = {value.name for node in graph.nodes if node.in_forward for value in node.inputs if value.stored}
    patterns = {*layers, *({*amount} - {"*"} if isinstance(amount, Mapping) else ())}
    return [
        group
        if group.reason
        or not read.isdisjoint(member.parameter for member in group.members)
        or _matches(group, patterns)
        else dataclasses.replace(group, reason=_OF_STEPS_ALONE)
        for group in groups
    ]


def _matches(group: Group, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(layer, pattern) for layer in group.layers for pattern in patterns)


def smallest_amount(group: Group, by_pattern: Mapping[str, float]) -> float | None:
    """Return the smallest fraction over the layers of a group; that of a layer is given by its first matching pattern.

    None if no layer matches a pattern.
    """
    first = (next((v for p, v in by_pattern.items() if fnmatchcase(layer, p)), None) for layer in group.layers)
    return min((value for value in first if value is not None), default=None)


def check_patterns(groups: Sequence[Group], patterns: Iterable[str]) -> None:
    """Check that every pattern matches a layer.

    Raises:
        MisconfigurationException: naming a pattern that does not, and some layers.
    """
    names = list(dict.fromkeys(layer for group in groups for layer in group.layers))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise MisconfigurationException(
                f"The pattern {pattern!r} matches no layer with channels.{_hint(names, pattern)} "
                f"The model's layers are: {some or 'none'}."
            )


def _hint(names: Sequence[str], pattern: str) -> str:
    """Return the correct pattern if it only has to lose the path of the model inside the LightningModule."""
    rest = pattern.partition(".")[2]
    while rest and not any(fnmatchcase(name, rest) for name in names):
        rest = rest.partition(".")[2]
    return f" Names are relative to the pruned model: use {rest!r}." if rest else ""


OF_STEPS = (
    " What the training step and the hooks around it read is preserved, because a callback compacts in the middle of "
    "the fit. At its end (`ModelCompaction(when=None)`), weights that a penalty or a log reads may be removed."
)
"""Advice to add if the training step prevents a removal."""


def check_prunable(groups: Sequence[Group], layers: Sequence[str]) -> None:
    """Check that at least one of the groups can be pruned.

    Raises:
        MisconfigurationException: with the reasons, if none can.
    """
    if not any(group.reason is None for group in groups):
        reasons = "; ".join(f"{group.name}: {group.reason}" for group in groups[:4]) or "it has no layers with channels"
        raise MisconfigurationException(
            f"Nothing can be pruned in {'the layers ' + repr(list(layers)) if layers else 'the model'} ({reasons})."
            f"{OF_STEPS if TRAINING in reasons else ''}"
        )


def warn_of_frozen(groups: Iterable[Group]) -> None:
    """Warn of groups that were to be pruned when the fit started, and can no longer be.

    Args:
        groups: present dependency groups.
    """
    frozen = [group for group in groups if group.reason]
    if frozen:
        reasons = "; ".join(f"{group.name}: {group.reason}" for group in frozen[:4])
        rank_zero_warn(
            f"{len(frozen)} {'group' if len(frozen) == 1 else 'groups'} of layers could be pruned when the fit "
            f"started, and no longer can ({reasons}).{OF_STEPS if TRAINING in reasons else ''}"
        )


def layers_that_stay(groups: Sequence[Group], most: int = 3) -> str:
    """Return a sentence that names the largest groups that cannot be pruned, with the reasons; empty if all can.

    Example:
        >>> import torch, engine
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> layers_that_stay(engine.dependency_groups(net, torch.zeros(1, 2)))
        ' Kept in any case: 2 (is an output of the model).'
    """
    whole = sorted((group for group in groups if group.reason), key=_weights, reverse=True)
    named = "; ".join(f"{group.name} ({group.reason})" for group in whole[:most])
    more = f"; and {len(whole) - most} more, which `summarize` lists" if len(whole) > most else ""
    return f" Kept in any case: {named}{more}." if whole else ""


def _weights(group: Group) -> int:
    """Return the number of weights that produce a group's units."""
    return sum(math.prod(member.shape) for member in group.members if member.role == "out")


def kept_units(groups: Sequence[Group], masks: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the units of each group that masks keep: those for which at least one producing weight is kept.

    Args:
        groups: dependency groups.
        masks: ``{module: {parameter: mask}}``; parameters without a mask are kept.

    Returns:
        ``{group name: bool of shape (size,)}`` on the CPU.
    """
    return {group.name: _kept(group, masks) for group in groups}


def _kept(group: Group, masks: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    members = [member for member in group.members if member.role == "out" and member.units.ndim > 1]
    keep = torch.zeros(group.size, dtype=torch.bool)
    for member in members:
        keep |= _member_kept(member, group.size, masks)
    return keep if members else ~keep


def _member_kept(member: Member, size: int, masks: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    module, _, parameter = member.parameter.rpartition(".")
    own = masks.get(module, {})
    mask = own.get(parameter, own.get(parameter.removesuffix("_orig")))
    units = member.units.cpu()
    hit = torch.zeros(size + 1, dtype=torch.bool)
    if mask is None:
        hit[units.flatten()] = True
        return hit[:size]
    free = [d for d in range(mask.ndim) if units.shape[d] == 1]
    kept = (mask != 0).cpu()
    kept = kept.amax(free, keepdim=True) if free else kept
    hit[units.expand_as(kept)[kept]] = True
    return hit[:size]
