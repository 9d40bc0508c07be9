"""The results of all runs of a model, on which the assumptions about code that did not run are based."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Protocol

from torch import nn

from engine.flow.coverage import CoverageTracer
from engine.program.expressions import Guard
from engine.program.graph import Node, Value

__all__ = ["RecordedRuns"]


class _State(Protocol):
    """The part of `MutableState` used here; it imports this file."""

    @property
    def set_later(self) -> Collection[tuple[str, str]]: ...

    @property
    def recorded_later(self) -> Collection[tuple[str, str]]: ...


@dataclass(frozen=True)
class RecordedRuns:
    """The results of all runs of a model.

    Attributes:
        modules: all modules by name.
        coverage: of the functions that ran.
        nodes, values, guards: the program.
        sized: places where code decides by sizes that differ between inputs.
        stored: values of the parameters and buffers that were read, by every name.
        parameters: names of all parameters.
        of_entries: code that only ran in entries, whose arguments the caller chooses.
        state: what code sets later; None if everything keeps its value.
    """

    modules: Mapping[str, nn.Module]
    coverage: CoverageTracer
    nodes: Sequence[Node]
    values: Sequence[Value]
    guards: Iterable[Guard]
    sized: Collection[str]
    stored: Mapping[str, Value]
    parameters: Collection[str]
    of_entries: Collection[CodeType] = ()
    state: _State | None = None

    @property
    def set_later(self) -> Collection[tuple[str, str]]:
        """Attributes that code sets later and that hold a value to vary, or a choice, by module."""
        return () if self.state is None else self.state.set_later

    @property
    def recorded_later(self) -> Collection[tuple[str, str]]:
        """Attributes that code sets later, and that were recorded with other values, by module."""
        return () if self.state is None else self.state.recorded_later
