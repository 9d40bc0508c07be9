"""Decisions that a model makes on numbers: comparisons, sorting, top k, suppression of overlapping boxes.

Numbers that are equal up to rounding may be decided differently: two boxes with the same score change places, and
nothing after them can be compared. So the second run repeats the decisions of the first as long as it decides on the
same numbers. That hides nothing, because it decides anew on numbers that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.program.storages import storage_of
from engine.program.trees import map_tensors, tensors_in

__all__ = ["Decision", "Decisions", "decides"]


@dataclass(frozen=True, eq=False)
class Decision:
    """One call.

    Attributes:
        op: its name.
        inputs: the floating-point tensors that were decided on.
        output: the result.
    """

    op: str
    inputs: tuple[Tensor, ...]
    output: Any

    def on_the_same(self, op: str, inputs: Sequence[Tensor], tolerance: float) -> bool:
        """Whether another call of the op decides on the same numbers, up to rounding."""
        if op != self.op or [t.shape for t in inputs] != [t.shape for t in self.inputs]:
            return False
        return all(_agree(old, new, tolerance) for old, new in zip(self.inputs, inputs, strict=True))


def _agree(old: Tensor, new: Tensor, tolerance: float) -> bool:
    differs = old != new  # equal infinities do not
    finite = old[old.isfinite()].abs()
    scale = finite.max() if finite.numel() else finite.new_zeros(())
    return bool(((old - new)[differs].abs() <= tolerance * scale).all())


def decides(args: Any, kwargs: Any, out: Any) -> tuple[Tensor, ...]:
    """Return the floating-point tensors that a call turned into integers or booleans; none for any other call.

    Example:
        >>> x = torch.rand(3)
        >>> len(decides((x,), {}, x.sort())), len(decides((x,), {}, x + 1))
        (1, 0)
    """
    if all(t.is_floating_point() or t.is_complex() for t in tensors_in(out)):
        return ()
    inputs = [t for t in tensors_in((args, kwargs)) if t.numel()]
    memory = set(map(storage_of, tensors_in(out)))
    if any(storage_of(t) in memory for t in inputs):
        return ()  # a view or a write, whose output has to keep its memory
    return tuple(t for t in inputs if t.is_floating_point())


class Decisions:
    """Records decisions, or repeats recorded ones.

    Args:
        earlier: decisions of another run, or None to decide freely.
        tolerance: relative difference up to which numbers count as equal.

    Attributes:
        taken: the decisions of this run.
    """

    def __init__(self, earlier: Sequence[Decision] | None = None, tolerance: float = 0.0) -> None:
        self._earlier, self._tolerance = earlier, tolerance
        self._calls = 0
        self.taken: list[Decision] = []

    @property
    def repeats(self) -> bool:
        """Whether the decisions of another run are repeated."""
        return self._earlier is not None

    def settle(self, op: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Return the output of a call, or the output of the same call in the earlier run."""
        inputs = decides(args, kwargs, out)
        if not inputs:
            return out
        position, self._calls = self._calls, self._calls + 1
        if self._earlier is None:
            self.taken.append(Decision(op, tuple(t.clone() for t in inputs), map_tensors(out, torch.clone)))
        elif position < len(self._earlier) and self._earlier[position].on_the_same(op, inputs, self._tolerance):
            return map_tensors(self._earlier[position].output, torch.clone)
        return out
