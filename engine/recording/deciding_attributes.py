"""Attributes that decide whether code runs: the model is recorded at values at which that code does.

No code sets them, but a user may, and code that did not run may keep all channels of what it reads. A run at another
value shows what it does with them. Attributes of a module's objects count as well: ``self.config.is_decoder``.
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

from engine.program.expressions import Guard
from engine.program.trees import tensors_in
from engine.recording.assumptions import Assumptions
from engine.recording.attributes import Attribute, turning_points
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.model_code import codes_of
from engine.recording.mutable_state import MutableState
from engine.recording.tested import attributes_tested, variables_tested
from engine.recording.variants import RecordedWay
from engine.source.attribute_writes import assigned_anywhere
from engine.source.branches import Branch
from engine.source.coverage import CoverageTracer, FunctionCoverage
from engine.source.function_text import syntax_of
from engine.source.instructions import arguments_of
from engine.source.integers import integers
from engine.source.outer_reads import OuterRead, outer_reads
from engine.source.rounds import add_new
from engine.source.syntax import compares_with_none, nodes_of

__all__ = ["record_deciding_attributes"]

_MOST_SETTINGS = 16
"""At how many settings the model is recorded."""

_PLAIN = (bool, int, float, str)

_LIBRARIES = (__name__.partition(".")[0], torch.__name__)
"""Packages whose layers keep their settings (``batch_first``); those of this one stand in for layers of torch."""


class _Candidate(NamedTuple):
    """An attribute that decides on code which did not run.

    Attributes:
        place: an attribute of a module, or of an object that this holds.
        key: what attributes of several modules of a class have in common.
        path: from the module: ``config.is_decoder``.
        function, branch: the code.
        condition: in which the attribute is read.
    """

    place: Attribute | OuterRead
    key: Hashable
    path: str
    function: FunctionCoverage
    branch: Branch
    condition: ast.expr

    def in_model(self, path: str) -> str:
        """Return what the path of an attribute, or an argument of the method, is called in the model."""
        return f"{self.function.owner}.{path}".lstrip(".")

    def arguments(self) -> set[str]:
        """Return what the method's arguments are called in the model on which the condition depends."""
        own, *arguments = arguments_of(self.function.function.code)
        tested = variables_tested([self.condition], self.function.function.tree) - {own}
        return {self.in_model(name) for name in arguments if name in tested}


@dataclass
class _Deciding:
    """An attribute, of several modules of a class, that decides on code which did not run.

    Attributes:
        places: attributes of modules, or of objects that these hold.
        branches: the code, with the coverage of its function.
        conditions: expressions in which it is read.
        names: what it is called in the model: ``encoder.config.is_decoder``.
        arguments: of methods on which the conditions depend as well: ``encoder.return_dict``.
    """

    places: list[Attribute | OuterRead] = field(default_factory=list)
    branches: list[tuple[FunctionCoverage, Branch]] = field(default_factory=list)
    conditions: list[ast.expr] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)

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
    settings = ((group, value) for group in groups.values() for value in _other_values(group, way.guards, numbers))
    for group, value in itertools.islice(settings, _MOST_SETTINGS):
        setting = [(place, value) for place in group.places if place.value != value]
        if setting and group.waits():  # where the model rejects it, the code keeps its channels
            way.at(recorder, setting, functools.partial(_settle_rejected, group, recorder, modules[""], changing))


def _settle_rejected(
    group: _Deciding, recorder: EntryRecorder, model: nn.Module, changing: MutableState, error: BaseException
) -> None:
    """Let a flag stay as it is at whose other value the results of modules do not fit the code that takes them.

    That code asks a container that was filled in this run for an attribute which it lacks. A flag that code sets, or
    beside which a condition asks for an argument that code passes, may meet other code in another call.

    Args:
        group: the flag.
        recorder: with the run that failed.
        model: whose code sets flags, and passes arguments.
        changing: learns what stays.
        error: which ended the run.
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
            changing.settle(name)


def _passes_any(arguments: Collection[str], own: Collection[CodeType], model: nn.Module) -> bool:
    """Whether code of a model passes some of the arguments of its methods by name, or more than one by position.

    Args:
        arguments: with the modules whose methods they are arguments of: ``encoder.return_dict``.
        own: code of these methods, which may hand them on.
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
    """Yield attributes that decide on code which did not run, at some places or anywhere."""
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
    """Yield the attributes of a module that decide whether a branch runs (``config.is_decoder``), and the condition.

    Those count as well from which a variable in the condition is computed, such as one that fills in for an argument.
    """
    own, tree = function.function.code.co_varnames[0], function.function.tree
    conditions = [c for c in (branch.test, *branch.earlier) if isinstance(c, ast.expr)]
    for condition in conditions:
        for path in dict.fromkeys(attributes_tested([condition], tree, own, module)):
            yield path, condition


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
