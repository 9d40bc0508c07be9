"""Inputs that a model rejects by a decision of its own: others that it rejects by the same one are not tried.

Code that compares the sizes of its inputs, and raises before it calls any op, does so for all inputs of which each of
these comparisons comes out the same: nothing else has told it of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from engine.program.expressions import COMPARISONS, AttributeOf, Guard, ShapeOf, evaluate, leaves
from engine.program.graph import Node, Value
from engine.source import provenance

__all__ = ["Rejections"]

Shapes = Sequence[tuple[int, ...]]
Numbers = Mapping[tuple[str, str], int]


class Rejections:
    """The decisions by which a model has rejected inputs.

    Args:
        numbers: returns the integer attributes of modules, by module and name.

    Example:
        >>> rejections = Rejections()
        >>> rejections.repeats([(1, 3, 8, 8)])
        False
    """

    def __init__(self, numbers: Callable[[], Numbers] = dict) -> None:
        self._numbers_of, self._numbers = numbers, dict[tuple[str, str], int]()
        self._example: Shapes = ()
        self._decisions: list[tuple[Sequence[Guard], Mapping[int, int]]] = []

    def start(self, example: Shapes) -> None:
        """Begin with inputs that the model accepts.

        Args:
            example: their shapes.
        """
        self._example, self._numbers = example, dict(self._numbers_of())

    def note(self, error: Exception, nodes: Sequence[Node], guards: Sequence[Guard], inputs: Sequence[Value]) -> None:
        """Keep the decisions of a run that the model broke off, if nothing else may have made it do so.

        That is where no op ran or failed, and the last comparison is the only one that is not as for the example.

        Args:
            error: which the run ended with; its cause is that of the model.
            nodes, guards, inputs: of the run.
        """
        positions = {value.index: position for position, value in enumerate(inputs)}
        if nodes or not guards or len(inputs) != len(self._example) or not _raised_by_code(error.__cause__):
            return
        if all(self._is_understood(guard, positions) for guard in guards):
            *before, last = (self._outcome(g, positions, self._example) is g.outcome for g in guards)
            if all(before) and not last:
                self._decisions.append((guards, positions))

    def repeats(self, shapes: Shapes) -> bool:
        """Whether the model rejects inputs of these shapes as it has others.

        Args:
            shapes: of the inputs, in order.
        """
        return any(
            all(self._outcome(guard, positions, shapes) is guard.outcome for guard in guards)
            for guards, positions in self._decisions
        )

    def _is_understood(self, guard: Guard, positions: Mapping[int, int]) -> bool:
        """Whether a guard is a comparison of sizes of inputs, and of attributes that have a number."""
        return guard.expr.symbol in COMPARISONS and all(
            leaf.value.index in positions if isinstance(leaf, ShapeOf) else (leaf.module, leaf.name) in self._numbers
            for leaf in leaves(guard.expr)
        )

    def _outcome(self, guard: Guard, positions: Mapping[int, int], shapes: Shapes) -> Any:
        def attribute(leaf: AttributeOf) -> int:
            return self._numbers[leaf.module, leaf.name]

        return evaluate(guard.expr, lambda value: shapes[positions[value.index]], attribute)


def _raised_by_code(cause: BaseException | None) -> bool:
    """Whether code raised an error by itself: it handles no other, and no function of torch failed."""
    return cause is not None and cause.__context__ is None and not _in_torch(cause.__traceback__)


def _in_torch(trace: TracebackType | None) -> bool:
    """Whether an error comes out of a function of torch, all of which the recorder calls; but for an assertion."""
    while trace is not None:
        inner = trace.tb_next
        calls = trace.tb_frame.f_code.co_filename == provenance.__file__
        if calls and (inner is None or inner.tb_frame.f_code is not torch._assert.__code__):
            return True
        trace = inner
    return False
