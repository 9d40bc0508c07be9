"""Slots, indices of parameter dimensions that could be removed, and the union-find that ties them.

A slot is an integer. Slot 0 means "not removable"; any slot tied to it is frozen. This module deals with nothing but
integers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["FROZEN", "Slots"]

_Integers = npt.NDArray[np.int64]

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
        # The arrays are small and many; numpy calls cost a third of torch's.
        self._parent = np.zeros(1024, dtype=np.int64)
        self._reason = np.zeros(1024, dtype=np.int64)
        self._mark = np.zeros(1024, dtype=np.bool_)
        self._reasons = ["", _UNLABELLED]
        self._reason[FROZEN] = 1
        self._count = 1

    def __len__(self) -> int:
        return self._count

    def new(self, n: int) -> Tensor:
        """Return ``n`` fresh slots, shape ``(n,)``, int64."""
        first, self._count = self._count, self._count + n
        if self._count > len(self._parent):
            more = max(self._count, 2 * len(self._parent)) - len(self._parent)
            self._parent, self._reason, self._mark = (
                np.concatenate([array, np.zeros(more, dtype=array.dtype)])
                for array in (self._parent, self._reason, self._mark)
            )
        fresh = np.arange(first, self._count)
        self._parent[first : self._count] = fresh
        return torch.from_numpy(fresh)

    def find(self, labels: Tensor) -> Tensor:
        """Return the representative of each label (same shape)."""
        return torch.from_numpy(np.asarray(self._find(labels.numpy())))

    def _find(self, labels: _Integers) -> _Integers:
        root = self._parent[labels]
        while True:
            above = self._parent[root]
            if (above == root).all():
                break
            root = above
        self._parent[labels] = root
        return root

    def union(self, a: Tensor, b: Tensor) -> None:
        """Tie ``a`` and ``b`` element by element, after broadcasting. A tie to slot 0 only freezes."""
        if a is not b:
            left, right = a.numpy(), b.numpy()
            if left.shape != right.shape:
                left, right = np.broadcast_arrays(left, right)
            self._union(left.reshape(-1), right.reshape(-1))

    def _union(self, a: _Integers, b: _Integers) -> None:
        fixed = (a == FROZEN) | (b == FROZEN)
        if fixed.any():
            self._freeze_roots(self._find(np.maximum(a, b)[fixed]), 1)
            a, b = a[~fixed], b[~fixed]
        while True:
            ra, rb = self._find(a), self._find(b)
            differ = ra != rb
            if not differ.any():
                return
            a, b, ra, rb = a[differ], b[differ], ra[differ], rb[differ]
            low, high = np.minimum(ra, rb), np.maximum(ra, rb)
            # Several pairs may try to move the same root: the smallest wins, the loop ties the rest. Reasons and marks
            # move to every candidate, since all of them end up in one class.
            np.maximum.at(self._reason, low, self._reason[high])
            self._mark[low[self._mark[high]]] = True
            np.minimum.at(self._parent, high, low)

    def freeze(self, labels: Tensor, reason: str) -> None:
        """Freeze the classes of ``labels``; a class that is already frozen keeps its reason."""
        self._reasons.append(reason)
        self._freeze_roots(self._find(labels.reshape(-1).numpy()), len(self._reasons) - 1)

    def _freeze_roots(self, root: _Integers, reason: int) -> None:
        self._reason[root[self._reason[root] == 0]] = reason

    def frozen(self, labels: Tensor) -> Tensor:
        """Return which labels are frozen, bool."""
        return torch.from_numpy(np.asarray(self._reason[self._find(labels.numpy())] != 0))

    def mark(self, labels: Tensor) -> None:
        """Mark the classes of ``labels``; a class with a marked member is marked."""
        self._mark[self._find(labels.numpy())] = True

    def marked(self, labels: Tensor) -> Tensor:
        """Return which labels belong to a marked class, bool."""
        return torch.from_numpy(np.asarray(self._mark[self._find(labels.numpy())]))

    def why(self, labels: Tensor) -> str | None:
        """Return the reason of the first frozen label, or None if none is frozen."""
        reasons = self._reason[self._find(labels.reshape(-1).numpy())]
        indices = reasons[reasons > 1]
        indices = indices if len(indices) else reasons[reasons > 0]
        return self._reasons[int(indices[0])] if len(indices) else None

    def roots(self) -> Tensor:
        """Return the representative of every slot, shape ``(len(self),)``."""
        return self.find(torch.arange(self._count))
