"""Constraints between slots beyond ties: numbers of kept slots that have to agree, layers that must not become empty.

A constraint only ever requires more slots to be kept, so computing a closure over all of them terminates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Constraint", "Equal", "Fewer", "Grouped", "Multiple", "NonEmpty", "closed"]


def _fill(labels: Tensor, kept: Tensor, short: Tensor, score: Tensor) -> Tensor:
    """Return the removed labels of each row with the highest scores, as many as the row is short of, flat."""
    rank = score[labels].masked_fill(kept, -torch.inf).argsort(dim=1, descending=True, stable=True)
    wanted = torch.arange(labels.size(1)) < short.clamp(min=0)[:, None]
    return labels.gather(1, rank)[wanted]


@dataclass(frozen=True, eq=False)
class Constraint:
    """Base class; ``missing`` returns slots that have to be kept in addition, empty if the constraint holds."""

    def holds(self, keep: Tensor) -> bool:
        """Whether the kept slots satisfy the constraint."""
        raise NotImplementedError

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return the slots that have to be kept in addition.

        Args:
            keep: bool per slot.
            score: importance per slot; higher scores are kept first.
        """
        raise NotImplementedError

    def resolve(self, roots: Tensor) -> Constraint:
        """Return the constraint with representatives in place of slots."""
        raise NotImplementedError

    def sites(self) -> list[Tensor]:
        """Return label sets that divide slots into groups of their own, because each set loses equally many."""
        return []


@dataclass(frozen=True, eq=False)
class NonEmpty(Constraint):
    """At least one of the slots is kept, so that a layer keeps an output."""

    labels: Tensor

    def holds(self, keep: Tensor) -> bool:
        """Whether any of the slots is kept."""
        return bool(keep[self.labels].any())

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return the slot with the highest score if none is kept."""
        if self.holds(keep):
            return self.labels[:0]
        return self.labels[score[self.labels].argmax()][None]

    def resolve(self, roots: Tensor) -> NonEmpty:
        """Return the constraint with representatives in place of slots."""
        return replace(self, labels=roots[self.labels].unique())


@dataclass(frozen=True, eq=False)
class Equal(Constraint):
    """All rows keep equally many slots, such as the pieces of a chunk.

    Attributes:
        rows: labels, shape (pieces, size).
    """

    rows: Tensor

    def holds(self, keep: Tensor) -> bool:
        """Whether the rows keep equally many slots, and at least one."""
        low, high = keep[self.rows].sum(1).aminmax()
        return bool(low == high) and bool(low > 0)

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return slots to add to each row that keeps fewer than the fullest."""
        kept = keep[self.rows]
        count = kept.sum(1)
        return _fill(self.rows, kept, count.max().clamp(min=1) - count, score)

    def resolve(self, roots: Tensor) -> Equal:
        """Return the constraint with representatives in place of slots."""
        return replace(self, rows=roots[self.rows])

    def sites(self) -> list[Tensor]:
        """Return each piece as a site."""
        return list(self.rows)


@dataclass(frozen=True, eq=False)
class Fewer(Constraint):
    """Fewer of some slots are kept than of others; torch recognises a recurrent projection by its smaller size.

    Attributes:
        few: labels, shape (few,).
        many: labels, shape (many,), which are more.
    """

    few: Tensor
    many: Tensor

    def holds(self, keep: Tensor) -> bool:
        """Whether fewer of ``few`` are kept than of ``many``."""
        return int(keep[self.few].sum()) < int(keep[self.many].sum())

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return slots to add to ``many``."""
        kept = keep[self.many][None]
        return _fill(self.many[None], kept, keep[self.few].sum() + 1 - kept.sum(1), score)

    def resolve(self, roots: Tensor) -> Fewer:
        """Return the constraint with representatives in place of slots."""
        return replace(self, few=roots[self.few], many=roots[self.many])


@dataclass(frozen=True, eq=False)
class Multiple(Constraint):
    """The number of kept channels is a multiple, as a kernel requires of the rows of a matrix.

    Attributes:
        labels: one per channel; channels may share labels.
        step: divisor of the number of channels.
    """

    labels: Tensor
    step: int

    def holds(self, keep: Tensor) -> bool:
        """Whether a positive multiple is kept."""
        kept = int(keep[self.labels].sum())
        return kept > 0 and kept % self.step == 0

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return as many slots as are missing from the next multiple."""
        kept = keep[self.labels][None]
        count = kept.sum(1)
        return _fill(self.labels[None], kept, (-count) % self.step + self.step * (count == 0), score)

    def resolve(self, roots: Tensor) -> Multiple:
        """Return the constraint with representatives in place of slots."""
        return replace(self, labels=roots[self.labels])


@dataclass(frozen=True, eq=False)
class Grouped(Constraint):
    """Groups of a convolution keep equally many inputs and equally many outputs, or are removed as a whole.

    Attributes:
        inputs: labels, shape (groups, inputs per group), or None if the input cannot be narrowed.
        outputs: labels, shape (groups, outputs per group).
        removable: whether whole groups can be removed.
    """

    inputs: Tensor | None
    outputs: Tensor
    removable: bool

    def _rows(self, keep: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return which groups are kept, and which inputs and outputs each group keeps."""
        kept = [keep[labels] for labels in (self.inputs, self.outputs) if labels is not None]
        active = torch.stack([rows.any(1) for rows in kept]).any(0)
        if self.inputs is None or not self.removable:
            active = torch.ones_like(active)
        if not active.any():
            active[0] = True
        return active, kept

    def holds(self, keep: Tensor) -> bool:
        """Whether kept groups keep equally many inputs, and equally many outputs."""
        active, kept = self._rows(keep)
        ranges = [rows.sum(1)[active].aminmax() for rows in kept]
        return all(bool(low == high) and bool(low > 0) for low, high in ranges)

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return slots to add to kept groups that keep fewer than the fullest."""
        active, rows = self._rows(keep)
        asked = []
        for labels, kept in zip((x for x in (self.inputs, self.outputs) if x is not None), rows, strict=True):
            count = kept.sum(1)
            short = (count[active].max().clamp(min=1) - count) * active
            asked.append(_fill(labels, kept, short, score))
        return torch.cat(asked)

    def resolve(self, roots: Tensor) -> Grouped:
        """Return the constraint with representatives in place of slots."""
        inputs = None if self.inputs is None else roots[self.inputs]
        return replace(self, inputs=inputs, outputs=roots[self.outputs])

    def sites(self) -> list[Tensor]:
        """Return each group's inputs and outputs as sites; what goes with its whole group goes independently."""
        rows = [labels for labels in (self.inputs, self.outputs) if labels is not None]
        if self.removable and self.inputs is not None:
            rows = [labels for labels in rows if not (labels == labels[:, :1]).all()]
        return [site for labels in rows for site in labels]


def closed(constraints: Sequence[Constraint], keep: Tensor, score: Callable[[], Tensor]) -> Tensor:
    """Keep more slots, in place, until all constraints hold.

    Args:
        constraints: on representatives.
        keep: bool per slot.
        score: returns the importance of slots; called only when there is a choice.
    """
    while True:
        before = int(keep.sum())
        for constraint in constraints:
            if not constraint.holds(keep):
                keep[constraint.missing(keep, score())] = True
        if int(keep.sum()) == before:
            return keep
