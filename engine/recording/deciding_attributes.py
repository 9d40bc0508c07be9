"""Attributes that decide whether code runs, recorded with values for which that code does run.

No code sets them, but a user may, and code that did not run keeps all channels of whatever it reads. A run with another
value shows what it really does. Attributes of objects that a module holds count as well: ``self.config.is_decoder``.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.alternatives.attributes import Attribute, turning_points
from engine.alternatives.mutable_state import MutableState
from engine.flow.branches import Branch
from engine.flow.coverage import CoverageTracer, FunctionCoverage
from engine.flow.rounds import add_new
from engine.flow.tested import attributes_tested, variables_tested
from engine.limits import MOST_DECIDING_SETTINGS
from engine.numbers.integers import integers
from engine.observations.assumptions import Assumptions
from engine.program.expressions import Guard
from engine.program.trees import tensors_in
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.variants import RecordedWay
from engine.source.attribute_writes import assigned_anywhere
from engine.source.function_text import syntax_of
from engine.source.instructions import arguments_of
from engine.source.model_code import codes_of
from engine.source.outer_reads import OuterRead, outer_reads
from engine.source.syntax import compares_with_none, nodes_of

__all__ = ["record_deciding_attributes"]


_PLAIN = (bool, int, float, str)

_LIBRARIES = (__name__.partition(".")[0], torch.__name__)
"""Packages whose layers keep their settings (``batch_first``); this package's own layers replace layers of torch."""


class _Candidate(NamedTuple):
    """An attribute that decides whether certain code runs.

    Attributes:
        place: the attribute, of a module or of an object that the module holds.
        key: a key that is equal for the same attribute of several modules of a class.
        path: from the module: ``config.is_decoder``.
        function, branch: the code that did not run.
        condition: the expression that reads the attribute.
    """

    place: Attribute | OuterRead
    key: Hashable
    path: str
    function: FunctionCoverage
    branch: Branch
    condition: ast.expr

    def in_model(self, path: str) -> str:
        """Return the name in the model of an attribute of the module, or of an argument of its method."""
        return f"{self.function.owner}.{path}".lstrip(".")

    def arguments(self) -> set[str]:
        """Return the names in the model of the method's arguments on which the condition depends."""
        own, *arguments = arguments_of(self.function.function.code)
        tested = variables_tested([self.condition], self.function.function.tree) - {own}
        return {self.in_model(name) for name in arguments if name in tested}


@dataclass
class _Deciding:
    """An attribute of several modules of a class that decides whether certain code runs.

    Attributes:
        places: the attribute in each module, or in an object that the module holds.
        branches: the code that did not run, with the coverage of its function.
        conditions: expressions that read the attribute.
        names: its names in the model: ``encoder.config.is_decoder``.
        arguments: of methods on which the conditions depend as well: ``encoder.return_dict``.
    """

    places: list[Attribute | OuterRead] = field(default_factory=list)
    branches: list[tuple[FunctionCoverage, Branch]] = field(default_factory=list)
    conditions: list[ast.expr] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)

    def waits(self) -> bool:
        """Whether some of the code has still not run."""
        return any(coverage.ran.isdisjoint(branch.offsets) for coverage, branch in self.branches)


def record_deciding_attributes(
    recorder: EntryRecorder,
    way: RecordedWay,
    modules: Mapping[str, nn.Module],
    changing: MutableState,
    unread: Callable[[], Assumptions],
) -> None:
    """Record the model with values for which code runs that has not run and would keep channels.

    Args:
        recorder: of the model.
        way: the default way to run the model on the example.
        modules: all modules by name.
        changing: lists the attributes that are recorded with other values elsewhere, or declared to keep theirs.
        unread: returns the assumptions about code that did not run.
    """
    candidates = functools.partial(_candidates, recorder.coverage, modules, changing)
    places = unread().keeping if any(True for _ in candidates(None)) else ()
    groups: dict[Hashable, _Deciding] = {}
    for own in candidates(places) if places else ():
        group = groups.setdefault(own.key, _Deciding())
        add_new(group.places, [own.place])
        group.branches.append((own.function, own.branch))
        group.conditions.append(own.condition)
        group.names.add(own.in_model(own.path))
        group.arguments |= own.arguments()
    numbers = {(name, key): n for name, module in modules.items() for key, n in integers(module).items()}
    settings = ((group, value) for group in groups.values() for value in _other_values(group, way.ran.guards, numbers))
    for group, value in itertools.islice(settings, MOST_DECIDING_SETTINGS):
        setting = [(place, value) for place in group.places if place.value != value]
        if setting and group.waits():  # where the model rejects it, the code keeps its channels
            way.at(recorder, setting, functools.partial(_settle_rejected, group, recorder, modules[""], changing))


def _settle_rejected(
    group: _Deciding, recorder: EntryRecorder, model: nn.Module, changing: MutableState, error: BaseException
) -> None:
    """Note that a flag is fixed if, with its other value, results of modules do not fit the code that receives them.

    This is the case if code reads an attribute that is missing from a container filled in this run. A flag that code
    sets, or whose condition also reads an argument that code passes, may meet other code in another call.

    Args:
        group: the flag.
        recorder: the recorder, with the run that failed.
        model: the model whose code sets flags and passes arguments.
        changing: notes which flags are fixed.
        error: the error that ended the run.
    """
    if not (isinstance(error, AttributeError) and type(error.obj) in (tuple, list, dict)):
        return
    if not any(map(recorder.has_computed, tensors_in(error.obj))) or len(group.places) != 1:
        return
    names = {name.rpartition(".")[2] for name in group.names}
    is_set = not names.isdisjoint(assigned_anywhere(model))
    own = {function.function.code for function, _ in group.branches}
    if type(group.places[0].value) is bool and not is_set and not _passes_any(group.arguments, own, model):
        for name in group.names:
            changing.take_as_constant(name)


def _passes_any(arguments: Collection[str], own: Collection[CodeType], model: nn.Module) -> bool:
    """Whether a model's code passes some arguments of its methods by name, or more than one by position.

    Args:
        arguments: arguments, prefixed by the module whose method takes them: ``encoder.return_dict``.
        own: code of these methods, which may pass them on.
        model: the model.
    """
    names = {argument.rpartition(".")[2] for argument in arguments}
    modules = {argument.rpartition(".")[0].rpartition(".")[2] for argument in arguments}
    trees = (syntax_of(code) for kind in {type(m) for m in model.modules()} for code in codes_of(kind) - set(own))  # type: ignore[arg-type]
    for call in (call for tree in trees if tree is not None for call in nodes_of(tree, ast.Call)):
        callee = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if any(keyword.arg in names for keyword in call.keywords) or (callee in modules and len(call.args) > 1):
            return True
    return False


def _candidates(
    coverage: CoverageTracer, modules: Mapping[str, nn.Module], changing: MutableState, places: Collection[str] | None
) -> Iterator[_Candidate]:
    """Yield attributes that decide whether code runs that has not run, at certain places or anywhere."""
    for function in list(coverage.functions.values()):
        file = function.function.code.co_filename
        pending = [b for b in function.pending() if not (b.skipped or b.computes_nothing)]
        pending = [b for b in pending if places is None or f"{file}:{b.line}" in places]
        module = modules.get(function.owner) if function.is_method and pending else None
        if module is None or type(module).__module__.partition(".")[0] in _LIBRARIES:
            continue
        outside: dict[str, OuterRead] | None = None
        for branch in pending:
            for path, condition in _attributes_read(branch, function, module):
                if changing.declared(f"{function.owner}.{path}".lstrip(".")):
                    continue
                if "." not in path:
                    attribute = Attribute(function.owner, module, path)
                    if (function.owner, path) not in changing.set_later and isinstance(attribute.value, _PLAIN):
                        yield _Candidate(attribute, (type(module), path), path, function, branch, condition)
                    continue
                if outside is None:
                    reads = outer_reads(function.function.code, function.space, module, coverage.is_own)
                    outside = {read.text.partition(".")[2]: read for read in reads if read.from_self}
                if path in outside and isinstance(outside[path].value, _PLAIN):
                    yield _Candidate(outside[path], outside[path].place, path, function, branch, condition)


def _attributes_read(branch: Branch, function: FunctionCoverage, module: nn.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes of a module that decide whether a branch runs (``config.is_decoder``), with the condition.

    Attributes from which a variable in the condition is computed count as well, such as a default for an argument.
    """
    own, tree = function.function.code.co_varnames[0], function.function.tree
    conditions = [c for c in (branch.test, *branch.earlier) if isinstance(c, ast.expr)]
    for condition in conditions:
        for path in dict.fromkeys(attributes_tested([condition], tree, own, module)):
            yield path, condition


def _other_values(group: _Deciding, guards: Collection[Guard], numbers: Mapping[tuple[str, str], int]) -> Iterator[Any]:
    """Yield the other flag, numbers that may reverse the comparisons, strings in these comparisons, and None."""
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
