"""Matching of the calls of a run to the recorded nodes, even if data lead to another path through the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.verification.witness import Witness

__all__ = ["Way"]


class Way:
    """Matches each call to a node of the witness.

    The n-th call matches the n-th node as long as the run follows the recorded path. Once the paths have diverged, a
    call matches the node of its module if both ran once (the experts of a mixture), and no node otherwise.

    Args:
        witness: the recorded nodes.

    Attributes:
        diverged: whether the run left the recorded path.
    """

    def __init__(self, witness: Witness) -> None:
        self._keys = [(node.module if witness.decided else "", node.op) for node in witness.nodes]
        number = Counter(self._keys)
        self._once = {k: n for n, k in enumerate(self._keys) if witness.decided and number[k] == 1}
        self._ran: Counter[tuple[str, str]] = Counter()
        self._calls = 0
        self.diverged = False

    def step(self, module: str, op: str) -> int | None:
        """Return the position of the node that runs."""
        position, key = self._calls, (module, op)
        self._calls += 1
        self._ran[key] += 1
        self.diverged |= position >= len(self._keys) or self._keys[position] != key
        if not self.diverged:
            return position
        return self._once.get(key) if self._ran[key] == 1 else None

    def end(self) -> Collection[int]:
        """Return the positions of the nodes that can be compared."""
        self.diverged |= self._calls != len(self._keys)
        if not self.diverged:
            return range(len(self._keys))
        return {position for key, position in self._once.items() if self._ran[key] == 1}
