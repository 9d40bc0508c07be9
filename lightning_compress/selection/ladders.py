"""In which order units go, and where one may stop: one ladder per group, pools of ladders that compete.

Each step down a ladder takes one unit of each row, as rows (groups of a convolution, pieces of a chunk) lose equally
many. One may stop where the width is allowed: a multiple of ``round_to``, not below ``minimum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from engine import Group
from lightning_compress.trainer.packages import MisconfigurationException


@dataclass(frozen=True, eq=False)
class Limits:
    """How far each group may go.

    Attributes:
        round_to: widths are multiples of it, where the unpruned one is not.
        minimum: width that stays at least.
        most: fraction of a group that may go at most.
        widths: units that may stay, where not all numbers may; the unpruned width always does.

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
    """The order in which the units of one group go.

    Attributes:
        group: the group.
        rows: units of each row, the least important first.
        stops: numbers of steps after which one may stop, ascending, from 0 on.
        scores: mean score of what goes between a stop and the one before, shape ``(len(stops) - 1,)``, ascending.
        dense: number of units before anything was removed from the model.
        bundle: ladders of the same bundle stop at the same stop; None: by itself.
    """

    group: Group
    rows: tuple[Tensor, ...]
    stops: tuple[int, ...]
    scores: Tensor
    dense: int
    bundle: Hashable = None

    def keep(self, stop: int) -> Tensor:
        """Which units stay at a stop, bool ``(size,)``."""
        stays = torch.ones(self.group.size, dtype=torch.bool)
        for row, gone in zip(self.rows, _gone(self.rows, self.stops[stop]), strict=True):
            stays[row[:gone]] = False
        return stays

    def removed(self, stop: int) -> int:
        """Units that are gone at a stop, those included that the model has lost already."""
        return self.dense - self.group.size + sum(_gone(self.rows, self.stops[stop]))


def _gone(rows: Sequence[Tensor], steps: int) -> list[int]:
    # Rows of unequal length lose in proportion; one unit of each stays.
    longest = max(map(len, rows))
    return [min(steps * len(row) // longest, len(row) - 1) for row in rows]


def ladder(
    group: Group, scores: Tensor, previous: Tensor | None = None, limits: Limits | None = None, dense: int | None = None
) -> Ladder:
    """The ladder of a group.

    Ties go by position, the lowest first. What is gone already goes first, whatever its score.

    Args:
        group: the group.
        scores: finite scores, shape ``(size,)``.
        previous: which units are not masked yet, bool of shape ``(size,)``.
        limits: how far it may go.
        dense: number of units that the group had before any compaction.

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
    # Pieces that are multiples to begin with (halves of a gated unit) stay so, each by itself.
    is_aligned = all(len(row) * span % limits.round_to == 0 for row in rows)
    for steps in range(max(map(len, rows))):
        left = [(len(row) - gone) * span for row, gone in zip(rows, _gone(rows, steps), strict=True)]
        gone = group.size - sum(left) // span
        rounded = not any(width % limits.round_to for width in (left if is_aligned else [sum(left)]))
        fits = rounded and sum(left) >= limits.minimum and gone <= most
        fits = fits and (limits.widths is None or sum(left) // span in limits.widths)
        if gone > before and (steps == 0 or fits):
            before = gone
            yield steps


def _block_scores(rows: Sequence[Tensor], stops: Sequence[int], scores: Tensor) -> Tensor:
    means = []
    for start, end in zip(stops[:-1], stops[1:], strict=True):
        spans = zip(rows, _gone(rows, start), _gone(rows, end), strict=True)
        block = torch.cat([scores[row[a:b]] for row, a, b in spans])
        alive = block[block > -torch.inf]
        means.append(alive.mean() if len(alive) else block.new_tensor(-torch.inf))
    # Rows of unequal length mix what is high in one with what is low in another: a later stop is never cheaper.
    return torch.stack(means).cummax(0)[0] if means else scores[:0]


def channels_per_unit(group: Group) -> int:
    """Channels that a unit has in each layer that puts it out: 1, or those of a head.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> channels_per_unit(engine.dependency_groups(net, torch.zeros(1, 1))[0])
        1
    """
    outputs = [member.units for member in group.members if member.role == "out" and member.units.ndim > 1]
    return math.gcd(*(int((units >= 0).sum()) // group.size or 1 for units in outputs)) or 1


def bundled(ladders: Sequence[Ladder]) -> list[Ladder]:
    """Tie groups of the same structure and size together: all keep the same number of units, each its own.

    A step of a bundle takes as many units of each group, and scores what it takes on average.

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
    """What two groups have in common whose structure is the same, whatever their width and depth.

    Groups are alike if the same kinds of parameters hold their units, in the same roles and along the same dimensions
    (Fang et al., "Isomorphic Pruning for Vision Models", 2024, compare such groups only with each other).

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
    """Ladders whose units compete: those with the lowest scores go first, from whichever group.

    Args:
        ladders: at least one.
    """

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        self.ladders = tuple(ladders)

    @cached_property
    def events(self) -> tuple[Tensor, Tensor, Tensor]:
        """What goes, one after the other: ladder, stop that it reaches, and fraction of the pool that is gone then."""
        ladder = torch.cat([torch.full((len(one.scores),), i) for i, one in enumerate(self.ladders)])
        stop = torch.cat([torch.arange(1, len(one.stops)) for one in self.ladders])
        order = torch.cat([one.scores for one in self.ladders]).argsort(stable=True)
        sizes = [torch.tensor([one.removed(s) for s in range(len(one.stops))]).diff() for one in self.ladders]
        start = sum(one.removed(0) for one in self.ladders)
        gone = torch.cat(sizes)[order].cumsum(0) + start
        return ladder[order], stop[order], gone / sum(one.dense for one in self.ladders)

    def count(self, fraction: float) -> int:
        """How many events fit into a fraction of the units: at most that many are gone after them."""
        return int((self.events[2] <= fraction + 1e-9).sum())


class Descent:
    """All pools merged into one order of events: each pool has lost the same fraction at any time.

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
        """Which units of each group stay after the first ``count`` events, by group name."""
        counts = torch.bincount(self._pool[:count], minlength=len(self.pools)).tolist()
        return {n: k for pool, c in zip(self.pools, counts, strict=True) for n, k in kept_after(pool, c).items()}


def kept_after(pool: Pool, count: int) -> dict[str, Tensor]:
    """Which units of each group of a pool stay after its first ``count`` events, by group name."""
    reached = torch.zeros(len(pool.ladders), dtype=torch.long)
    reached.scatter_reduce_(0, pool.events[0][:count], pool.events[1][:count], "amax")
    stops = dict(zip(pool.ladders, reached.tolist(), strict=True))
    lowest: dict[Hashable, int] = {}
    for one, stop in stops.items():
        lowest[one.bundle] = min(stop, lowest.get(one.bundle, stop))
    return {one.group.name: one.keep(stop if one.bundle is None else lowest[one.bundle]) for one, stop in stops.items()}


def pools(ladders: Iterable[Ladder], amounts: Mapping[str, float], scope: Scope) -> list[tuple[float, Pool]]:
    """Ladders that compete, and the amount of each pool: groups of other amounts are in other pools.

    Args:
        ladders: the ladders of the groups to prune.
        amounts: fraction by group name.
        scope: gives a key; groups of the same key compete. A bundle has that of its first group, and the smallest
            amount of its groups.
    """
    ladders = tuple(ladders)
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
    """Refuse widths that are not numbers from 1 on.

    Raises:
        MisconfigurationException: names the argument.
    """
    for name, allowed in (widths or {}).items():
        if not allowed or not all(type(width) is int and width >= 1 for width in allowed):
            raise MisconfigurationException(f"`widths` of {name!r} are numbers from 1 on, got {allowed!r}.")
    for name, value in (("round_to", round_to), ("minimum", minimum)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MisconfigurationException(f"`{name}` is a number of channels from 1 on, got {value!r}.")
