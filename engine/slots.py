"""Slots: indices of parameter dimensions that may be removed, and the union-find that ties those which go together.

A slot is an integer. Slot 0 stands for "not removable"; whatever is tied to it is frozen. Nothing but integers is known
here.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FROZEN", "Slots"]

FROZEN = 0
_UNLABELLED = "meets a tensor whose size along this axis is fixed"


class Slots:
    """A growing set of slots with a vectorised union-find and one reason per frozen class.

    Example:
        >>> slots = Slots()
        >>> a, b = slots.new(3), slots.new(3)
        >>> slots.union(a, b)
        >>> bool((slots.find(a) == slots.find(b)).all())
        True
        >>> slots.freeze(a[:1], "is the model's output")
        >>> slots.frozen(b).tolist(), slots.why(b)
        ([True, False, False], "is the model's output")
    """

    def __init__(self) -> None:
        self._parent = torch.zeros(1024, dtype=torch.long)
        self._reason = torch.zeros(1024, dtype=torch.long)
        self._reasons = ["", _UNLABELLED]
        self._reason[FROZEN] = 1
        self._count = 1

    def __len__(self) -> int:
        return self._count

    def new(self, n: int) -> Tensor:
        """Return ``n`` fresh slots, shape ``(n,)``, int64."""
        first, self._count = self._count, self._count + n
        if self._count > len(self._parent):
            grown = max(self._count, 2 * len(self._parent))
            self._parent = torch.cat([self._parent, self._parent.new_zeros(grown - len(self._parent))])
            self._reason = torch.cat([self._reason, self._reason.new_zeros(grown - len(self._reason))])
        fresh = torch.arange(first, self._count)
        self._parent[first : self._count] = fresh
        return fresh

    def find(self, labels: Tensor) -> Tensor:
        """Return the representative of each label (same shape)."""
        root = self._parent[labels]
        while True:
            above = self._parent[root]
            if torch.equal(above, root):
                break
            root = above
        self._parent[labels] = root
        return root

    def union(self, a: Tensor, b: Tensor) -> None:
        """Tie ``a`` and ``b`` element by element, after broadcasting. A tie to slot 0 freezes and does nothing else."""
        a, b = (t.reshape(-1) for t in torch.broadcast_tensors(a, b))
        fixed = (a == FROZEN) | (b == FROZEN)
        if fixed.any():
            self._freeze_roots(self.find(torch.maximum(a, b)[fixed]), 1)
            a, b = a[~fixed], b[~fixed]
        while True:
            ra, rb = self.find(a), self.find(b)
            differ = ra != rb
            if not differ.any():
                return
            a, b = a[differ], b[differ]
            low, high = torch.minimum(ra, rb)[differ], torch.maximum(ra, rb)[differ]
            # Several pairs may want to move the same root: the smallest wins, the loop ties the rest. A reason moves
            # along to every candidate: they end in one class anyway.
            self._reason.scatter_reduce_(0, low, self._reason[high], "amax")
            self._parent.scatter_reduce_(0, high, low, "amin")

    def freeze(self, labels: Tensor, reason: str) -> None:
        """Mark the classes of ``labels`` as not removable; a class that is frozen already keeps its reason."""
        self._reasons.append(reason)
        self._freeze_roots(self.find(labels.reshape(-1)), len(self._reasons) - 1)

    def _freeze_roots(self, root: Tensor, reason: int) -> None:
        self._reason[root[self._reason[root] == 0]] = reason

    def frozen(self, labels: Tensor) -> Tensor:
        """Return a bool tensor: which labels are not removable."""
        return self._reason[self.find(labels)] != 0

    def why(self, labels: Tensor) -> str | None:
        """Return the reason of the first frozen label, or None where none is frozen."""
        reasons = self._reason[self.find(labels.reshape(-1))]
        known = reasons[reasons > 1]
        known = known if len(known) else reasons[reasons > 0]
        return self._reasons[int(known[0])] if len(known) else None

    def roots(self) -> Tensor:
        """Return the representative of every slot, shape ``(len(self),)``."""
        return self.find(torch.arange(self._count))
