"""Flags and numbers outside the model's modules that its code reads, recorded with other values as well.

Anyone may set a global, an attribute of a class or of a configuration, an item of a table, a context variable or an
environment variable, even after the model is compacted. Code that only runs with another value becomes part of the
program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any

from torch import nn

from engine.alternatives.attribute_choices import record_in_steps
from engine.alternatives.attributes import other_choices, other_reals
from engine.flow.coverage import CoverageTracer
from engine.limits import MOST_OUTER_RUNS, MOST_OUTER_VALUES
from engine.program.stored import distinct_modules
from engine.source.attribute_writes import written_anywhere
from engine.source.function_text import syntax_of
from engine.source.model_code import words_in
from engine.source.outer_reads import UNSET, OuterRead, is_environment, outer_reads
from engine.source.reassigned import Reassigned

__all__ = ["OuterSetting", "OuterValue", "OuterValues"]


@dataclass(frozen=True, eq=False)
class OuterValue:
    """A value outside the model's modules that its code reads.

    Attributes:
        reads: where it is read from; several if modules of one class have an object each.
        code: a function that reads it.
        owner: a module to whose code this function belongs.
    """

    reads: Sequence[OuterRead]
    code: CodeType
    owner: nn.Module

    @property
    def value(self) -> Any:
        """The current value."""
        return self.reads[0].value

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Run the body with another value."""
        with ExitStack() as scope:
            for read in self.reads:
                scope.enter_context(read.holding(value))
            yield

    def __str__(self) -> str:
        return self.reads[0].text


OuterSetting = Sequence[tuple[OuterValue, Any]]
"""Values outside the model's modules, each with another value."""


class OuterValues:
    """The values outside a model's modules that its code reads.

    Args:
        model: the model.
        coverage: coverage of its code, which may grow.
    """

    def __init__(self, model: nn.Module, coverage: CoverageTracer) -> None:
        self._model, self._coverage = model, coverage
        self._of_class: dict[type, list[nn.Module]] = {}
        for module in distinct_modules(model).values():
            self._of_class.setdefault(type(module), []).append(module)
        self._pending: dict[CodeType, list[OuterValue]] = {}
        self._written_beside: dict[type | None, frozenset[str]] = {}
        self._reassigned = Reassigned(model)

    def new(self) -> list[OuterValue]:
        """Return the values that code has read since the last call of this method, and that may change later."""
        for code, (space, first) in list(self._coverage.called.items()):
            if code not in self._pending:
                owners = self._of_class.get(first, []) if first is not None else []
                self._pending[code] = list(self._read_by(code, space, owners))
        values: dict[tuple[int, Any], OuterValue] = {}
        for code, pending in self._pending.items():
            if pending:
                ran = [value for value in pending if self._coverage.evaluated(code, value.reads[0].node)]
                self._pending[code] = [value for value in pending if value not in ran]
                for value in ran:
                    values.setdefault(value.reads[0].place, value)
        return list(values.values())

    def _read_by(self, code: CodeType, space: Any, owners: Sequence[nn.Module]) -> Iterator[OuterValue]:
        groups: dict[str, dict[tuple[int, Any], OuterRead]] = {}
        first = outer_reads(code, space, owners[0] if owners else None, self._coverage.is_own)
        others = owners[1:] if any(read.from_self and self._may_change(read) for read in first) else ()
        for reads in (first, *(outer_reads(code, space, module, self._coverage.is_own) for module in others)):
            for read in filter(self._may_change, reads):
                groups.setdefault(read.text, {}).setdefault(read.place, read)
        owner = owners[0] if owners else self._model
        return (OuterValue(list(reads.values()), code, owner) for reads in groups.values())

    def _may_change(self, read: OuterRead) -> bool:
        """Whether a value may be set later: a flag or a gate that all code shares, or anything that some code sets."""
        value = read.value
        if is_environment(read.holder):
            return True
        if not isinstance(value, (bool, int, float, str, Enum)):
            return False
        gate = isinstance(value, bool) or (isinstance(value, float) and value in (0.0, 1.0))
        is_shared = gate and not read.from_self and not self._is_private_constant(read)
        return is_shared or not read.names.isdisjoint(self._written(read))

    def _is_private_constant(self, read: OuterRead) -> bool:
        """Whether a value is a private global that no function sets, such as ``_torch_available``."""
        python_module = read.python_module
        if python_module is None or not read.key.startswith("_"):
            return False
        return not self._reassigned.variable(python_module, read.key)

    def _written(self, read: OuterRead) -> frozenset[str]:
        kind = read.holder if isinstance(read.holder, type) else None
        if kind not in self._written_beside:
            self._written_beside[kind] = written_anywhere(self._model, *([] if kind is None else [kind]))
        return self._written_beside[kind]

    def record(
        self,
        accepts: Callable[[OuterSetting], bool],
        values: Sequence[OuterValue],
        leads_on: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Record the model with other values, one at a time, and with all flags on, and off.

        Args:
            accepts: records a run with a setting, and returns whether it succeeded.
            values: the values that were read.
            leads_on: returns whether the run that was recorded last took a step that none before it took.

        Returns:
            The values for which no other value could be recorded.
        """
        settings = [[(outer, value)] for outer in values for value in _other_values(outer)]
        tried = settings[:MOST_OUTER_RUNS]
        recorded = {id(setting[0][0]) for setting in tried if record_in_steps(setting, accepts, leads_on)}
        flags = [outer for outer in values if isinstance(outer.value, bool)]
        for value in (True, False):
            others = [(flag, value) for flag in flags if flag.value is not value]
            if len(others) > 1:
                accepts(others)
        return [str(outer) for outer in values if id(outer) not in recorded]


def _other_values(outer: OuterValue) -> list[Any]:
    """Return other values of the same kind: the other flag, other floats, and limits and words in the code."""
    value = outer.value
    others: Iterable[Any]
    if is_environment(outer.reads[0].holder):
        words = (word for word in words_in(outer.code) if word != outer.reads[0].key)
        others = ("1", "0", UNSET, *words)
    elif isinstance(value, bool):
        others = [not value]
    elif isinstance(value, float):
        others = other_reals(value)
    elif isinstance(value, int):
        others = (value + 1, max(value - 1, 0), *(n + step for n in _whole_numbers(outer.code) for step in (0, 1, -1)))
    else:
        others = other_choices(value, outer.owner, [outer.code])
    return [other for other in dict.fromkeys(others) if other != value][:MOST_OUTER_VALUES]


def _whole_numbers(code: CodeType) -> list[int]:
    """Return the whole numbers in a function."""
    tree = syntax_of(code)
    nodes = () if tree is None else ast.walk(tree)
    return [n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is int]
