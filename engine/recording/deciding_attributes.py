"""Attributes that decide whether code runs: the model is recorded at values at which that code does.

No code sets them, but a user may, and code that did not run may keep all channels of what it reads. A run at another
value shows what it does with them. Attributes of a module's objects count as well: ``self.config.is_decoder``.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from engine.program.expressions import Guard
from engine.recording.assumptions import Assumptions
from engine.recording.attributes import Attribute, turning_points
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.mutable_state import MutableState
from engine.recording.variants import RecordedWay
from engine.source.branches import Branch
from engine.source.coverage import CoverageTracer, FunctionCoverage
from engine.source.integers import integers
from engine.source.outer_reads import OuterRead, outer_reads
from engine.source.syntax import compares_with_none, nodes_of

__all__ = ["record_deciding_attributes"]

_MOST_SETTINGS = 16
"""At how many settings the model is recorded."""

_PLAIN = (bool, int, float, str)


@dataclass
class _Deciding:
    """An attribute, of several modules of a class, that decides on code which did not run.

    Attributes:
        places: attributes of modules, or of objects that these hold.
        branches: the code, with the coverage of its function.
        conditions: expressions in which it is read.
    """

    places: list[Attribute | OuterRead] = field(default_factory=list)
    branches: list[tuple[FunctionCoverage, Branch]] = field(default_factory=list)
    conditions: list[ast.expr] = field(default_factory=list)

    def waits(self) -> bool:
        """Whether some of the code still did not run."""
        return any(coverage.ran.isdisjoint(branch.offsets) for coverage, branch in self.branches)


def record_deciding_attributes(
    recorder: EntryRecorder,
    way: RecordedWay,
    modules: Mapping[str, nn.Module],
    changing: MutableState,
    unread: Callable[[], Assumptions],
) -> None:
    """Record the model at values at which code runs that did not and that keeps channels, as far as it accepts them.

    Args:
        recorder: of the model.
        way: in which the model runs on the example.
        modules: all modules by name.
        changing: names the attributes that are recorded at other values anyway, or declared to keep theirs.
        unread: returns what code could do that did not run.
    """
    candidates = list(_candidates(recorder.coverage, modules, changing))
    places = unread().keeping if candidates else ()
    groups: dict[Hashable, _Deciding] = {}
    for place, key, function, branch, condition in candidates:
        if f"{function.function.code.co_filename}:{branch.line}" in places:
            group = groups.setdefault(key, _Deciding())
            group.places += [place] if place not in group.places else []
            group.branches.append((function, branch))
            group.conditions.append(condition)
    numbers = {(name, key): n for name, module in modules.items() for key, n in integers(module).items()}
    settings = ((group, value) for group in groups.values() for value in _other_values(group, way.guards, numbers))
    for group, value in itertools.islice(settings, _MOST_SETTINGS):
        setting = [(place, value) for place in group.places if place.value != value]
        if setting and group.waits():  # where the model rejects it, the code keeps its channels
            way.at(recorder, setting)


def _candidates(
    coverage: CoverageTracer, modules: Mapping[str, nn.Module], changing: MutableState
) -> Iterator[tuple[Attribute | OuterRead, Hashable, FunctionCoverage, Branch, ast.expr]]:
    """Yield attributes that decide on code which did not run, with what is alike for those of a class, and the code."""
    for function in list(coverage.functions.values()):
        pending = [b for b in function.pending() if not (b.skipped or b.computes_nothing)]
        module = modules.get(function.owner) if function.is_method and pending else None
        if module is None:
            continue
        outside: dict[str, OuterRead] | None = None
        for branch in pending:
            for name, condition in _attributes_read(branch, function.function.code.co_varnames[0]):
                if changing.declared(f"{function.owner}.{name}".lstrip(".")):
                    continue
                if "." not in name:
                    attribute = Attribute(function.owner, module, name)
                    if (function.owner, name) not in changing.set_later and isinstance(attribute.value, _PLAIN):
                        yield attribute, (type(module), name), function, branch, condition
                    continue
                if outside is None:
                    reads = outer_reads(function.function.code, function.space, module, coverage.is_own)
                    outside = {read.text.partition(".")[2]: read for read in reads if read.from_self}
                if name in outside and isinstance(outside[name].value, _PLAIN):
                    yield outside[name], outside[name].place, function, branch, condition


def _attributes_read(branch: Branch, own: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes of a module that decide whether a branch runs (``config.is_decoder``), and the condition."""
    conditions = [c for c in (branch.test, *branch.earlier) if isinstance(c, ast.expr)]
    for condition in conditions:
        for node in nodes_of(condition, ast.Attribute):
            root, _, name = ast.unparse(node).partition(".")
            if root == own:
                yield name, condition


def _other_values(group: _Deciding, guards: Collection[Guard], numbers: Mapping[tuple[str, str], int]) -> Iterator[Any]:
    """Yield other flags, numbers at which comparisons may come out otherwise, texts that these contain, and None."""
    written = [node.value for condition in group.conditions for node in nodes_of(condition, ast.Constant)]
    others: list[Any] = []
    for kind in {type(place.value) for place in group.places}:
        if kind is bool:
            others += {not place.value for place in group.places}
        elif kind is int:
            names = {(place.owner, place.name) for place in group.places if isinstance(place, Attribute)}
            others += (n for guard in guards if guard.decides for n in turning_points(guard, numbers, names))
            others += (n + step for n in written if type(n) is int for step in (0, 1, -1))
        elif kind is str:
            others += (word for word in written if type(word) is str)
    yield from dict.fromkeys(others)
    if any(map(compares_with_none, itertools.chain(*(nodes_of(c, ast.Compare) for c in group.conditions)))):
        yield None
