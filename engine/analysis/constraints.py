"""What must hold between slots beyond "these go together": counts that agree, and layers that keep something.

A constraint only ever asks to keep more, so that a closure over all of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Constraint", "Equal", "Fewer", "Grouped", "Multiple", "NonEmpty", "closed"]


def _fill(labels: Tensor, kept: Tensor, short: Tensor, score: Tensor) -> Tensor:
    """Return the best removed labels of each row, as many as the row is short of, flat."""
    rank = score[labels].masked_fill(kept, -torch.inf).argsort(dim=1, descending=True, stable=True)
    wanted = torch.arange(labels.size(1)) < short.clamp(min=0)[:, None]
    return labels.gather(1, rank)[wanted]


@dataclass(frozen=True, eq=False)
class Constraint:
    """Base: ``missing`` returns slots to keep in addition, empty where the constraint holds."""

    def holds(self, keep: Tensor) -> bool:
        """Whether nothing is missing."""
        raise NotImplementedError

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Return the slots that have to be kept too.

        Args:
            keep: bool per slot.
            score: importance per slot; where there is a choice the higher one is kept.
        """
        raise NotImplementedError

    def resolve(self, roots: Tensor) -> Constraint:
        """Return the constraint on representatives."""
        raise NotImplementedError

    def sites(self) -> list[Tensor]:
        """Return the label sets that a slot must be told apart by: equal numbers go from each."""
        return []


@dataclass(frozen=True, eq=False)
class NonEmpty(Constraint):
    """At least one of the slots stays: a layer keeps an output."""

    labels: Tensor

    def holds(self, keep: Tensor) -> bool:
        """Whether any of the slots is kept."""
        return bool(keep[self.labels].any())

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Ask for the best slot where none is kept."""
        if self.holds(keep):
            return self.labels[:0]
        return self.labels[score[self.labels].argmax()][None]

    def resolve(self, roots: Tensor) -> NonEmpty:
        """Return the constraint on representatives."""
        return replace(self, labels=roots[self.labels].unique())


@dataclass(frozen=True, eq=False)
class Equal(Constraint):
    """The rows keep equally many: the pieces of a chunk.

    Attributes:
        rows: labels, shape (pieces, size).
    """

    rows: Tensor

    def holds(self, keep: Tensor) -> bool:
        """Whether the rows keep equally many, and something."""
        low, high = keep[self.rows].sum(1).aminmax()
        return bool(low == high) and bool(low > 0)

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Ask for more in the rows that keep fewer than the fullest."""
        kept = keep[self.rows]
        count = kept.sum(1)
        return _fill(self.rows, kept, count.max().clamp(min=1) - count, score)

    def resolve(self, roots: Tensor) -> Equal:
        """Return the constraint on representatives."""
        return replace(self, rows=roots[self.rows])

    def sites(self) -> list[Tensor]:
        """Each piece is a site."""
        return list(self.rows)


@dataclass(frozen=True, eq=False)
class Fewer(Constraint):
    """Less is kept of some slots than of others: a projection of recurrent units is known by its being smaller.

    Attributes:
        few: labels, shape (few,).
        many: labels, shape (many,), of which there are more.
    """

    few: Tensor
    many: Tensor

    def holds(self, keep: Tensor) -> bool:
        """Whether fewer of the few are kept than of the many."""
        return int(keep[self.few].sum()) < int(keep[self.many].sum())

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Ask for more of the many."""
        kept = keep[self.many][None]
        return _fill(self.many[None], kept, keep[self.few].sum() + 1 - kept.sum(1), score)

    def resolve(self, roots: Tensor) -> Fewer:
        """Return the constraint on representatives."""
        return replace(self, few=roots[self.few], many=roots[self.many])


@dataclass(frozen=True, eq=False)
class Multiple(Constraint):
    """A multiple of a number is kept: rows of a matrix that a kernel wants in whole steps.

    Attributes:
        labels: one per channel; channels may share labels.
        step: what their number is a multiple of.
    """

    labels: Tensor
    step: int

    def holds(self, keep: Tensor) -> bool:
        """Whether a multiple is kept, and something."""
        kept = int(keep[self.labels].sum())
        return kept > 0 and kept % self.step == 0

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Ask for as many more as are short."""
        kept = keep[self.labels][None]
        count = kept.sum(1)
        return _fill(self.labels[None], kept, (-count) % self.step + self.step * (count == 0), score)

    def resolve(self, roots: Tensor) -> Multiple:
        """Return the constraint on representatives."""
        return replace(self, labels=roots[self.labels])


@dataclass(frozen=True, eq=False)
class Grouped(Constraint):
    """A grouped convolution: its groups keep equally many inputs and equally many outputs, or go as a whole.

    Attributes:
        inputs: labels, shape (groups, inputs per group), or None where the input cannot shrink.
        outputs: labels, shape (groups, outputs per group).
        removable: whether whole groups may go.
    """

    inputs: Tensor | None
    outputs: Tensor
    removable: bool

    def _rows(self, keep: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return which groups stay, and which inputs and outputs each group keeps."""
        kept = [keep[labels] for labels in (self.inputs, self.outputs) if labels is not None]
        active = torch.stack([rows.any(1) for rows in kept]).any(0)
        if self.inputs is None or not self.removable:
            active = torch.ones_like(active)
        if not active.any():
            active[0] = True
        return active, kept

    def holds(self, keep: Tensor) -> bool:
        """Whether the groups that stay keep equally many inputs, and equally many outputs."""
        active, kept = self._rows(keep)
        ranges = [rows.sum(1)[active].aminmax() for rows in kept]
        return all(bool(low == high) and bool(low > 0) for low, high in ranges)

    def missing(self, keep: Tensor, score: Tensor) -> Tensor:
        """Ask for more in the groups that stay and keep fewer than the fullest."""
        active, rows = self._rows(keep)
        asked = []
        for labels, kept in zip((x for x in (self.inputs, self.outputs) if x is not None), rows, strict=True):
            count = kept.sum(1)
            short = (count[active].max().clamp(min=1) - count) * active
            asked.append(_fill(labels, kept, short, score))
        return torch.cat(asked)

    def resolve(self, roots: Tensor) -> Grouped:
        """Return the constraint on representatives."""
        inputs = None if self.inputs is None else roots[self.inputs]
        return replace(self, inputs=inputs, outputs=roots[self.outputs])

    def sites(self) -> list[Tensor]:
        """Each group's inputs and outputs are sites; a single input goes with its whole group, whatever others do."""
        whole = self.inputs is None or self.inputs.size(1) == 1 and self.removable
        return [*([] if self.inputs is None or whole else self.inputs), *self.outputs]


def closed(constraints: Sequence[Constraint], keep: Tensor, score: Callable[[], Tensor]) -> Tensor:
    """Keep more, in place, until all constraints hold.

    Args:
        constraints: on representatives.
        keep: bool per slot.
        score: is asked for the importance of slots where there is a choice.
    """
    while True:
        before = int(keep.sum())
        for constraint in constraints:
            if not constraint.holds(keep):
                keep[constraint.missing(keep, score())] = True
        if int(keep.sum()) == before:
            return keep
