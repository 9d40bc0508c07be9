"""Removal order of units: a ladder per group with its allowed widths, and pools of ladders that compete.

Each step of a ladder removes one unit of each row, because all rows (groups of a convolution, pieces of a chunk) lose
equally many. Stops are the steps at which the width is allowed: a multiple of ``round_to``, not below ``minimum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from engine import Group
from engine.bounds import calling, check_number, is_list, is_number
from lightning_compress.trainer.packages import MisconfigurationException


@dataclass(frozen=True, eq=False)
class Limits:
    """Limits of the width of a group.

    Attributes:
        round_to: widths are multiples of this, except for the unpruned width.
        minimum: minimum remaining width.
        most: maximum fraction of the group to remove.
        widths: allowed numbers of remaining units; None: all. The unpruned width is always allowed.

    Example:
        >>> Limits(round_to=8).round_to
        8
    """

    round_to: int = 1
    minimum: int = 1
    most: float = 1.0
    widths: frozenset[int] | None = None


@dataclass(frozen=True, eq=False)
class Ladder:
    """Removal order of the units of one group.

    Attributes:
        group: the group.
        rows: units of each row, the least important first.
        stops: numbers of steps at which the width is allowed, ascending from 0.
        scores: mean score of the units removed between two stops, shape ``(len(stops) - 1,)``, ascending.
        dense: number of units in the unpruned model.
        bundle: ladders of the same bundle use the same stop; None: no bundle.
    """

    group: Group
    rows: tuple[Tensor, ...]
    stops: tuple[int, ...]
    scores: Tensor
    dense: int
    bundle: Hashable = None

    def keep(self, stop: int) -> Tensor:
        """Return the units that remain at a stop, bool ``(size,)``."""
        kept = torch.ones(self.group.size, dtype=torch.bool)
        for row, removed in zip(self.rows, _removed(self.rows, self.stops[stop]), strict=True):
            kept[row[:removed]] = False
        return kept

    def stop_at(self, fraction: float) -> int:
        """Return the last stop at which at most a fraction of the group is removed."""
        return sum(self.removed(stop) <= fraction * self.dense + 1e-9 for stop in range(1, len(self.stops)))

    def removed(self, stop: int) -> int:
        """Return the number of units removed at a stop, including those that earlier compactions removed."""
        return self.dense - self.group.size + sum(_removed(self.rows, self.stops[stop]))


def _removed(rows: Sequence[Tensor], steps: int) -> list[int]:
    # Rows of unequal length lose units in proportion; each keeps at least one.
    longest = max(map(len, rows))
    return [min(steps * len(row) // longest, len(row) - 1) for row in rows]


def ladder(
    group: Group, scores: Tensor, previous: Tensor | None = None, limits: Limits | None = None, dense: int | None = None
) -> Ladder:
    """Build the ladder of a group.

    Ties are broken by index. Masked units come first, whatever their scores.

    Args:
        group: the group.
        scores: finite scores, shape ``(size,)``.
        previous: units that are not masked, bool of shape ``(size,)``.
        limits: limits of the group's width.
        dense: number of units of the group in the unpruned model.

    Example:
        >>> from types import SimpleNamespace
        >>> group = SimpleNamespace(size=4, rows=torch.zeros(4), members=())
        >>> rungs = ladder(group, torch.tensor([3.0, 1.0, 2.0, 1.0]))
        >>> rungs.stops, rungs.keep(2)
        ((0, 1, 2, 3), tensor([ True, False,  True, False]))
    """
    limits = limits or Limits()
    scores = scores.detach().cpu().double()
    scores = scores if previous is None else torch.where(previous.cpu(), scores, -torch.inf)
    rows = tuple(index[scores[index].argsort(stable=True)] for index in _rows(group.rows.cpu()))
    dense = max(group.size, dense or 0)
    stops = tuple(_stops(group, rows, limits, dense))
    return Ladder(group, rows, stops, _block_scores(rows, stops, scores), dense)


def _rows(labels: Tensor) -> Iterable[Tensor]:
    return ((labels == label).nonzero()[:, 0] for label in labels.unique())


def _stops(group: Group, rows: Sequence[Tensor], limits: Limits, dense: int) -> Iterable[int]:
    span, before = channels_per_unit(group), -1
    most = math.floor(limits.most * dense + 1e-9) - (dense - group.size)
    # If each piece (such as a half of a gated unit) is a multiple to begin with, each piece remains one.
    is_aligned = all(len(row) * span % limits.round_to == 0 for row in rows)
    for steps in range(max(map(len, rows))):
        widths = [(len(row) - removed) * span for row, removed in zip(rows, _removed(rows, steps), strict=True)]
        total = sum(widths)
        removed = group.size - total // span
        rounded = not any(width % limits.round_to for width in (widths if is_aligned else [total]))
        fits = rounded and total >= limits.minimum and removed <= most
        fits = fits and (limits.widths is None or total // span in limits.widths)
        if removed > before and (steps == 0 or fits):
            before = removed
            yield steps


def _block_scores(rows: Sequence[Tensor], stops: Sequence[int], scores: Tensor) -> Tensor:
    means = []
    for start, end in zip(stops[:-1], stops[1:], strict=True):
        spans = zip(rows, _removed(rows, start), _removed(rows, end), strict=True)
        block = torch.cat([scores[row[a:b]] for row, a, b in spans])
        unmasked = block[block > -torch.inf]
        means.append(unmasked.mean() if len(unmasked) else block.new_tensor(-torch.inf))
    # Rows of unequal length mix high scores of one with low scores of another, so enforce ascending means.
    return torch.stack(means).cummax(0)[0] if means else scores[:0]


def channels_per_unit(group: Group) -> int:
    """Return the number of channels of a unit in each layer that produces it: 1, or the size of a head.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> channels_per_unit(engine.dependency_groups(net, torch.zeros(1, 1))[0])
        1
    """
    outputs = [member.units for member in group.members if member.role == "out" and member.units.ndim > 1]
    return math.gcd(*(int((units >= 0).sum()) // group.size or 1 for units in outputs)) or 1


def bundled(ladders: Sequence[Ladder]) -> list[Ladder]:
    """Bundle ladders of groups of the same structure and size, so that all keep the same number of units.

    Each step of a bundle removes equally many units of each group, with their mean score.

    Example:
        >>> bundled([])
        []
    """
    bundles: dict[Hashable, list[Ladder]] = {}
    for one in ladders:
        bundles.setdefault((isomorphism(one.group), tuple(map(len, one.rows)), one.dense), []).append(one)
    tied: dict[str, Ladder] = {}
    for key, members in bundles.items():
        steps = min(len(one.stops) for one in members)
        scores = torch.stack([one.scores[: steps - 1] for one in members]).mean(0)
        for one in members:
            tied[one.group.name] = replace(one, stops=one.stops[:steps], scores=scores, bundle=key)
    return [tied[one.group.name] for one in ladders]


Scope = Callable[[Group], Hashable]


def isomorphism(group: Group) -> Hashable:
    """Return a key of a group's structure, which is independent of width and depth.

    Groups have the same structure if the same kinds of parameters hold their units, in the same roles and along the
    same dimensions (Fang et al., "Isomorphic Pruning for Vision Models", 2024, rank units only within such groups).

    Example:
        >>> import engine
        >>> net = nn.Sequential(*[nn.Linear(8 - i, 7 - i) for i in range(3)])
        >>> one, two, out = engine.dependency_groups(net, torch.zeros(1, 8))
        >>> isomorphism(one) == isomorphism(two), isomorphism(one) == isomorphism(out)
        (True, False)
    """
    return frozenset(
        (member.role, len(member.shape), member.shape[2:], tuple(n > 1 for n in member.units.shape))
        for member in group.members
    ), channels_per_unit(group) > 1


SCOPES: dict[str, Scope] = {
    "global": lambda group: "all",
    "group": lambda group: group.name,
    "isomorphic": isomorphism,
}


class Pool:
    """Ladders whose units compete: units with the lowest scores are removed first, whatever their group.

    Args:
        ladders: at least one.
    """

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        self.ladders = tuple(ladders)

    @cached_property
    def events(self) -> tuple[Tensor, Tensor, Tensor]:
        """Removals in order: index of the ladder, the stop that it reaches, and the fraction of the pool removed."""
        ladder = torch.cat([torch.full((len(one.scores),), i) for i, one in enumerate(self.ladders)])
        stop = torch.cat([torch.arange(1, len(one.stops)) for one in self.ladders])
        order = torch.cat([one.scores for one in self.ladders]).argsort(stable=True)
        sizes = [torch.tensor([one.removed(s) for s in range(len(one.stops))]).diff() for one in self.ladders]
        start = sum(one.removed(0) for one in self.ladders)
        removed = torch.cat(sizes)[order].cumsum(0) + start
        return ladder[order], stop[order], removed / sum(one.dense for one in self.ladders)

    def count(self, fraction: float) -> int:
        """Return the number of events after which at most a fraction of the units is removed."""
        return int((self.events[2] <= fraction + 1e-9).sum())


class Descent:
    """All pools merged into one order of events, in which all pools lose the same fraction at any time.

    Args:
        pools: the pools.

    Example:
        >>> Descent([]).keep(0)
        {}
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.pools = tuple(pools)
        number = [torch.full((len(pool.events[0]),), i) for i, pool in enumerate(pools)]
        event = [torch.arange(len(pool.events[0])) for pool in pools]
        when = torch.cat([pool.events[2] for pool in pools]) if pools else torch.zeros(0)
        order = when.argsort(stable=True)
        self._pool = torch.cat(number)[order] if pools else order
        self._event = torch.cat(event)[order] if pools else order

    def __len__(self) -> int:
        return len(self._pool)

    def keep(self, count: int) -> dict[str, Tensor]:
        """Return the units of each group that remain after the first ``count`` events, by group name."""
        counts = torch.bincount(self._pool[:count], minlength=len(self.pools)).tolist()
        return {n: k for pool, c in zip(self.pools, counts, strict=True) for n, k in kept_after(pool, c).items()}


def kept_after(pool: Pool, count: int) -> dict[str, Tensor]:
    """Return the units of each group of a pool that remain after its first ``count`` events, by group name."""
    reached = torch.zeros(len(pool.ladders), dtype=torch.long)
    reached.scatter_reduce_(0, pool.events[0][:count], pool.events[1][:count], "amax")
    stops = dict(zip(pool.ladders, reached.tolist(), strict=True))
    lowest: dict[Hashable, int] = {}
    for one, stop in stops.items():
        lowest[one.bundle] = min(stop, lowest.get(one.bundle, stop))
    return {one.group.name: one.keep(stop if one.bundle is None else lowest[one.bundle]) for one, stop in stops.items()}


def pools(ladders: Iterable[Ladder], amounts: Mapping[str, float], scope: Scope) -> list[tuple[float, Pool]]:
    """Divide ladders into pools by scope and amount.

    Args:
        ladders: the ladders of the groups to prune.
        amounts: fraction by group name.
        scope: returns a key of a group; groups of the same key compete. A bundle has the key of its first group, and
            the smallest amount of its groups.

    Returns:
        The amount and the ladders of each pool.
    """
    ladders = tuple(ladders)
    for one in ladders:
        with calling(f"`scope` for group {one.group.name!r}", MisconfigurationException):
            key = scope(one.group)
        if not isinstance(key, Hashable):
            raise MisconfigurationException(
                f"`scope` returned {key!r} for group {one.group.name!r}: return a number, text or a tuple of them."
            )
    bundles: dict[Hashable, tuple[float, Hashable]] = {}
    for one in ladders:
        amount, key = bundles.get(one.bundle, (1.0, scope(one.group)))
        bundles[one.bundle] = min(amount, amounts[one.group.name]), key
    ladders_by_key: dict[tuple[float, Hashable], list[Ladder]] = {}
    for one in ladders:
        own = amounts[one.group.name], scope(one.group)
        ladders_by_key.setdefault(own if one.bundle is None else bundles[one.bundle], []).append(one)
    return [(amount, Pool(members)) for (amount, _), members in ladders_by_key.items()]


def check_limits(round_to: int, minimum: int, widths: Mapping[str, Sequence[int]] | None = None) -> None:
    """Check that widths are positive integers.

    Raises:
        MisconfigurationException: naming an argument that is not.
    """
    for name, allowed in (widths or {}).items():
        whole = isinstance(allowed, Collection) and is_list(allowed) and len(allowed) > 0
        if not whole or not all(is_number(width, whole=True) and width >= 1 for width in allowed):
            raise MisconfigurationException(f"`widths` of {name!r} must be positive integers, got {allowed!r}.")
    for name, value in (("round_to", round_to), ("minimum", minimum)):
        check_number(name, value, 1, whole=True, error=MisconfigurationException)
