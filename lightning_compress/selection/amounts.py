"""Which units of each group are pruned: pure functions of groups, scores and amounts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from engine import Group, Member
from lightning_compress.trainer.packages import MisconfigurationException

Masks = dict[str, dict[str, Tensor]]


def check_amount(amount: float | Mapping[str, float], name: str = "amount") -> None:
    """Refuse amounts that are not fractions.

    Raises:
        MisconfigurationException: if an amount is outside [0, 1].

    Example:
        >>> check_amount({"layer1.*": 0.3, "*": 0.5})
    """
    for value in amount.values() if isinstance(amount, Mapping) else (amount,):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise MisconfigurationException(
                f"`{name}` is a fraction in [0, 1], or fractions by pattern, got {value!r}."
            )


def as_patterns(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Patterns as a tuple.

    Example:
        >>> as_patterns("conv*"), as_patterns(None)
        (('conv*',), ())
    """
    return (patterns,) if isinstance(patterns, str) else tuple(patterns or ())


def amounts(
    groups: Sequence[Group],
    amount: float | Mapping[str, float],
    layers: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, float]:
    """The fraction to remove of each group.

    A group counts as chosen where one of its layers matches ``layers``, and as excluded where one matches ``exclude``.
    Coupled layers lose the same channels, so of several amounts the smallest applies.

    Args:
        groups: dependency groups; those with a ``reason`` stay whole.
        amount: fraction in [0, 1], or fractions by name pattern; the first that matches a layer applies.
        layers: name patterns (`fnmatch`) of the layers to prune; none means all.
        exclude: name patterns of layers to leave alone.

    Returns:
        ``{group name: fraction}`` of the groups to prune.

    Raises:
        MisconfigurationException: if a pattern matches nothing, or only what must stay whole.
    """
    by_pattern = dict(amount) if isinstance(amount, Mapping) else {"*": amount}
    check_patterns(groups, [*layers, *exclude, *(by_pattern if isinstance(amount, Mapping) else ())])
    chosen = [group for group in groups if not layers or _matches(group, layers)]
    check_prunable(chosen, layers)
    fractions = {
        group.name: smallest_amount(group, by_pattern)
        for group in chosen
        if not group.reason and not _matches(group, exclude)
    }
    return {name: value for name, value in fractions.items() if value is not None}


def _matches(group: Group, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(layer, pattern) for layer in group.layers for pattern in patterns)


def smallest_amount(group: Group, by_pattern: Mapping[str, float]) -> float | None:
    """The smallest fraction that applies to a layer of a group: of each layer, that of the first pattern it matches."""
    first = (next((v for p, v in by_pattern.items() if fnmatchcase(layer, p)), None) for layer in group.layers)
    return min((value for value in first if value is not None), default=None)


def check_patterns(groups: Sequence[Group], patterns: Iterable[str]) -> None:
    """Refuse patterns that match no layer.

    Raises:
        MisconfigurationException: names the pattern and some layers.
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
    """What to write where the pattern begins with the path of the model inside the LightningModule."""
    rest = pattern.partition(".")[2]
    while rest and not any(fnmatchcase(name, rest) for name in names):
        rest = rest.partition(".")[2]
    return f" Names are those inside of the model that is pruned: write {rest!r}." if rest else ""


def check_prunable(groups: Sequence[Group], layers: Sequence[str]) -> None:
    """Refuse a choice in which nothing can be pruned.

    Raises:
        MisconfigurationException: gives the reasons.
    """
    if not any(group.reason is None for group in groups):
        reasons = "; ".join(f"{group.name}: {group.reason}" for group in groups[:4]) or "it has no layers with channels"
        raise MisconfigurationException(
            f"Nothing can be pruned in {'the layers ' + repr(list(layers)) if layers else 'the model'} ({reasons})."
        )


def kept_units(groups: Sequence[Group], masks: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Which units of each group the masks keep: those with at least one weight element that outputs them.

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
    alive = (mask != 0).cpu()
    alive = alive.amax(free, keepdim=True) if free else alive
    hit[units.expand_as(alive)[alive]] = True
    return hit[:size]
