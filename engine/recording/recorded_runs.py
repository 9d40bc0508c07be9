"""All that the runs of a model recorded, for what is assumed of code that did not run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from torch import nn

from engine.program.expressions import Guard
from engine.program.graph import Node, Value
from engine.source.coverage import CoverageTracer

__all__ = ["RecordedRuns"]


@dataclass(frozen=True)
class RecordedRuns:
    """All that the runs of a model recorded.

    Attributes:
        modules: all modules by name.
        coverage: of the functions that ran.
        nodes, values, guards: the program.
        sized: places at which sizes decide that differ between inputs.
        stored: values of the parameters and buffers that were read, by every name.
        parameters: names of all parameters.
        of_entries: code that ran in entries alone, whose arguments the caller chooses.
        set_later: attributes that code sets later, by module and name.
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
    set_later: Collection[tuple[str, str]] = ()
