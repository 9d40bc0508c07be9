"""Decisions by which a model rejects inputs: further inputs that the same decision rejects are not tried.

Code that compares the sizes of its inputs, and raises before it calls any op, raises for all inputs for which these
comparisons have the same outcomes, because it knows nothing else about its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from engine.program.expressions import COMPARISONS, AttributeOf, Guard, ShapeOf, evaluate, leaves
from engine.program.graph import Node, Value
from engine.running import provenance

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
        """Start from inputs that the model accepts.

        Args:
            example: their shapes.
        """
        self._example, self._numbers = example, dict(self._numbers_of())

    def note(self, error: Exception, nodes: Sequence[Node], guards: Sequence[Guard], inputs: Sequence[Value]) -> None:
        """Keep the decisions of a run that ended with an error, if nothing else can have caused the error.

        That is the case if no op ran or failed, and only the last comparison differs from the run on the example.

        Args:
            error: the error that ended the run; its cause is the model's own error.
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
        """Whether the model rejects inputs of these shapes by a decision that has rejected others.

        Args:
            shapes: of the inputs, in order.
        """
        return any(
            all(self._outcome(guard, positions, shapes) is guard.outcome for guard in guards)
            for guards, positions in self._decisions
        )

    def _is_understood(self, guard: Guard, positions: Mapping[int, int]) -> bool:
        """Whether a guard only compares sizes of inputs, and attributes whose values are known."""
        return guard.expr.symbol in COMPARISONS and all(
            leaf.value.index in positions if isinstance(leaf, ShapeOf) else (leaf.module, leaf.name) in self._numbers
            for leaf in leaves(guard.expr)
        )

    def _outcome(self, guard: Guard, positions: Mapping[int, int], shapes: Shapes) -> Any:
        def attribute(leaf: AttributeOf) -> int:
            return self._numbers[leaf.module, leaf.name]

        return evaluate(guard.expr, lambda value: shapes[positions[value.index]], attribute)


def _raised_by_code(cause: BaseException | None) -> bool:
    """Whether code itself raised an error: not while handling another one, and not because a torch function failed."""
    return cause is not None and cause.__context__ is None and not _in_torch(cause.__traceback__)


def _in_torch(trace: TracebackType | None) -> bool:
    """Whether an error comes from a torch function, all of which the recorder calls, other than an assertion."""
    while trace is not None:
        inner = trace.tb_next
        calls = trace.tb_frame.f_code.co_filename == provenance.__file__
        if calls and (inner is None or inner.tb_frame.f_code is not torch._assert.__code__):
            return True
        trace = inner
    return False
