"""Which instructions of the user's functions run, and which values their variables have at conditions."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch import Tensor, nn

from engine.flow.branches import Branch, FunctionBranches, branches_of
from engine.flow.omitted_arguments import empty_arguments, fallback_variables, holds_either, is_filled
from engine.flow.package_lines import PackageLines
from engine.flow.picked_containers import containers_by_line, note_contents
from engine.flow.rounds import Rounds, add_new, repeatable
from engine.flow.skips import SkipWatch
from engine.limits import MOST_VALUES
from engine.program.trees import tensors_in
from engine.source.function_text import lines_of
from engine.source.instructions import arguments_of, has_while_loop
from engine.source.sites import is_foreign, is_library, is_of_a_package
from engine.source.unread_code import UnreadFunction

__all__ = ["CoverageTracer", "FunctionCoverage"]


@dataclass
class FunctionCoverage:
    """The part of a function that ran, in all calls for one module.

    Attributes:
        function: the function.
        owner: name of the module.
        is_method: whether the module is its first argument.
        space: globals of the function.
        ran: offsets of the instructions that ran.
        seen: values of variables, and `RESULT`, where a branch was decided on and did not run, by branch and name.
        calls: maximum number of calls in one run.
        fallbacks: values that replaced arguments which were None, by name of the argument.
        omitted: arguments that were None or empty.
        contents: contents of containers where items are picked from them, by line and variable.
    """

    function: FunctionBranches
    owner: str
    is_method: bool
    space: Mapping[str, Any]
    ran: set[int] = field(default_factory=set)
    seen: dict[Branch, dict[str, list[Any]]] = field(default_factory=dict)
    calls: int = 0
    fallbacks: dict[str, list[Any]] = field(default_factory=dict)
    omitted: set[str] = field(default_factory=set)
    contents: dict[tuple[int, str], list[Any]] = field(default_factory=dict)

    def merge(self, other: FunctionCoverage) -> None:
        """Add the coverage of another run."""
        self.ran |= other.ran
        self.calls = max(self.calls, other.calls)
        self.omitted |= other.omitted
        for branch, names in other.seen.items():
            for name, summary in names.items():
                add_new(self.seen.setdefault(branch, {}).setdefault(name, []), summary)
        for name, summary in other.fallbacks.items():
            self.fallbacks.setdefault(name, []).extend(summary)
        for place, summary in other.contents.items():
            add_new(self.contents.setdefault(place, []), summary)

    def pending(self) -> list[Branch]:
        """Return the branches that have not run."""
        return [branch for branch in self.function.branches if self.ran.isdisjoint(branch.offsets)]

    def repeated(self) -> list[Branch]:
        """Return the branches that ran in some rounds of a loop, or some calls in a run, but not in all."""
        branches = repeatable(self.function, self.calls > 1, self.is_method)
        ran = (b for b in self.function.branches if not self.ran.isdisjoint(b.offsets))
        return [b for b in ran if b in branches and b in self.seen]


class CoverageTracer:
    """Traces functions outside of torch that have branches; a debugger's trace function is suspended meanwhile.

    A run that raises an error is discarded.

    Args:
        files: files of packages whose functions are traced as well as the user's own.
        summarize: returns what to keep of the value of a variable, or None.
        summarize_items: the same for a container from which items are picked.
        owner: returns the name of the module that a call belongs to, and whether that is its first argument.
        forward: the code of forward, which is traced even if it has no branches.
        recorded_as: returns the tensor that stands for a tensor in the recording.
        count_line: called for each line that runs of a function with a loop that may not end, and of those watched.
        origins: returns what tells one kept value of a variable from another: where in the code tensors are computed.

    Attributes:
        functions: coverage by code of the function and name of the module.
        unread: functions without source, by the same.
        package_lines: the lines of packages' functions that ran.
        called: frames' globals, and the class of the first argument, of all functions that ran, by their code.
        filled: arguments that held tensors in all calls of a function, by its code.
        cut_off: code of functions that an error ended which another function caught.
        caught_new_error: whether the last run caught an error where no earlier run did.
        opened_branches: whether the last run was the first to pass by code that did not run and reads something, or the
            first in which a variable that such code reads holds the result of another line.
    """

    def __init__(
        self,
        files: Container[str],
        summarize: Callable[[Any], Any],
        summarize_items: Callable[[Any], Any],
        owner: Callable[[FrameType], tuple[str, bool]],
        forward: CodeType | None = None,
        recorded_as: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        count_line: Callable[[], None] = lambda: None,
        origins: Callable[[Any], Iterable[Hashable]] = lambda summary: (),
    ) -> None:
        self._files, self._summarize, self._owner, self._origins = files, summarize, owner, origins
        self._summarize_items = summarize_items
        self._read_by_branches = set[Hashable]()
        self._forward, self._recorded_as, self._count_line = forward, recorded_as, count_line
        self._fallbacks: list[tuple[FunctionCoverage, str, Tensor]] = []
        self._watched: dict[int, tuple[CodeType, FunctionBranches | None]] = {}
        self.functions: dict[tuple[CodeType, str], FunctionCoverage] = {}
        self.unread: dict[tuple[CodeType, str], UnreadFunction] = {}
        self._unread_in_run: dict[tuple[CodeType, str], UnreadFunction] = {}
        self._unread = set[int]()  # identities of their code
        self._first: dict[CodeType, CodeType] = {}  # of several functions with equal code, the one that ran first
        self._before_entries: frozenset[CodeType] | None = None
        self._this_run: dict[tuple[CodeType, str], FunctionCoverage] = {}
        self._is_watching, self._pauses = False, 0
        self.called: dict[CodeType, tuple[Mapping[str, Any], type | None]] = {}
        self.filled: dict[CodeType, Collection[str]] = {}
        self._with_filled = set[int]()  # identities of such code
        self.cut_off, self.caught_new_error, self.opened_branches = set[CodeType](), False, False
        self._errors, self._errors_of_run = set[tuple[CodeType, int]](), set[tuple[CodeType, int]]()
        self._cut_off_in_run = set[CodeType]()
        self._first_run: list[tuple[FunctionBranches, set[int]]] = []  # offsets that ran for the first time
        self._first_called: list[CodeType] = []  # functions without branches
        self._ignored: set[int] = set()  # identities of code that is kept alive above
        self._may_not_end: set[int] = set()  # the same
        self._trace, self.package_lines = self._tracer(), PackageLines()

    def _tracer(self) -> Callable[[FrameType, str, Any], Any]:
        """Return a trace function, which Python calls for each call of a function."""
        ignored, call = self._ignored, self._enter

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            return None if id(frame.f_code) in ignored else call(frame)

        return trace

    @property
    def codes_of_entries(self) -> frozenset[CodeType]:
        """Code of the functions that only ran in entries."""
        codes = frozenset(code for code, _ in self.functions)
        return frozenset() if self._before_entries is None else codes - self._before_entries

    def begin_entries(self) -> None:
        """Note which functions ran before the first entry does."""
        if self._before_entries is None:
            self._before_entries = frozenset(code for code, _ in self.functions)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace the body."""
        self._this_run, self._is_watching, self._pauses, prior = {}, True, 0, sys.gettrace()
        self._unread_in_run = {}
        self._fallbacks, self._errors_of_run, self._cut_off_in_run = [], set(), set()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            self._is_watching = False
            sys.settrace(prior)
        for coverage, name, value in self._fallbacks:
            summary = self._summarize(self._recorded_as(value))
            coverage.fallbacks.setdefault(name, []).extend([] if summary is None else [summary])
        self._fallbacks = []
        self.caught_new_error = not self._errors_of_run <= self._errors
        self._errors |= self._errors_of_run
        self.cut_off |= self._cut_off_in_run
        for key, function in self._unread_in_run.items():
            self.unread.setdefault(key, function).merge(function)
        opened = [key for key in self._this_run if self._opens_branches(key)]
        self.opened_branches = bool(opened)
        for key, coverage in self._this_run.items():
            before = self.functions[key].ran if key in self.functions else frozenset()
            self._first_run.append((coverage.function, coverage.ran - before))
            if key in self.functions:
                self.functions[key].merge(coverage)
            else:
                self.functions[key] = coverage

    def _opens_branches(self, key: tuple[CodeType, str]) -> bool:
        coverage, before = self._this_run[key], self.functions[key].seen if key in self.functions else {}
        waiting = {
            branch: names
            for branch, names in coverage.seen.items()
            if not branch.computes_nothing and coverage.ran.isdisjoint(branch.offsets)
        }
        read = {
            (key, branch, name, origin)
            for branch, names in waiting.items()
            for name, summaries in names.items()
            for summary in summaries
            for origin in self._origins(summary)
        }
        reads_more = not read <= self._read_by_branches
        self._read_by_branches |= read
        return reads_more or any(any(names.values()) for branch, names in waiting.items() if branch not in before)

    def pause(self) -> None:
        """Stop tracing: the following calls are not the user's code."""
        if self._is_watching:
            self._pauses += 1
            if self._pauses == 1:
                sys.settrace(None)

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._is_watching:
            self._pauses -= 1
            if not self._pauses:
                sys.settrace(self._trace)

    def _coverage(self, function: FunctionBranches, frame: FrameType) -> FunctionCoverage:
        owner, is_method = self._owner(frame)
        key = function.code, owner
        if key not in self._this_run:
            coverage = self._this_run[key] = FunctionCoverage(function, owner, is_method, frame.f_globals)
            coverage.ran |= self.functions[key].ran if key in self.functions else set()
        return self._this_run[key]

    def is_own(self, file: str) -> bool:
        """Whether a file belongs to the model's code, or to the user's."""
        return not is_library(file) and (file in self._files or not is_foreign(file))

    def take_names(self) -> frozenset[str]:
        """Return the names in code that ran for the first time since the last call of this method."""
        names = {name for code in self._first_called for name in (*code.co_names, *code.co_varnames)}
        for function, offsets in self._first_run:
            names |= function.names_at(offsets) if offsets else set()
        self._first_run, self._first_called = [], []
        return frozenset(names)

    def ran(self, code: CodeType, node: ast.AST) -> bool:
        """Whether a syntax node of a function ran for some module; in a function without branches, every node did."""
        own = [coverage for (other, _), coverage in self.functions.items() if other is code]
        return not own or any(coverage.function.ran(node, coverage.ran) for coverage in own)

    def evaluated(self, code: CodeType, node: ast.AST) -> bool:
        """Whether a syntax node of a function ran, as far as known; in a function without branches, every node did."""
        own = [coverage for (other, _), coverage in self.functions.items() if other is code]
        return not own or any(coverage.function.evaluated(node, coverage.ran) for coverage in own)

    def _watch(self, frame: FrameType) -> FunctionBranches | None:
        """Return the branches of a function to trace; None if it is not traced."""
        code = frame.f_code
        own = self.is_own(code.co_filename)
        if own:
            linecache.lazycache(code.co_filename, frame.f_globals)  # the text of what an archive or a package loads
        is_copy = self._first.setdefault(code, code) is not code  # equal code of another file, or of one loaded twice
        function = branches_of(code, code is self._forward) if own and not is_copy else None
        if own and (is_copy or not lines_of(code)):
            self._unread.add(id(code))
        if own:
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self.called[code] = frame.f_globals, None if first is None else type(first)
            self.filled[code] = {name for name in arguments_of(code) if is_filled(frame.f_locals.get(name))}
            if self.filled[code]:
                self._with_filled.add(id(code))
            if function is None:
                self._first_called.append(code)
        self._watched[id(code)] = code, function
        if own and has_while_loop(code):
            self._may_not_end.add(id(code))
        if is_of_a_package(code.co_filename) and not own:
            self.package_lines.watch(code)
        elif function is None and id(code) not in self._unread | self._may_not_end | self._with_filled:
            self._ignored.add(id(code))
        return function

    def _enter(self, frame: FrameType) -> Any:
        code = frame.f_code
        watched = self._watched.get(id(code))  # by identity: hashing a code object takes longer than the rest
        function = self._watch(frame) if watched is None else watched[1]
        if watched is not None and id(code) in self._with_filled:
            self._narrow_filled(frame)
        counts = self._step_of_loop if id(code) in self._may_not_end else None
        if function is None:
            return self._enter_unread(frame) if id(code) in self._unread else counts or self.package_lines.enter(frame)
        coverage = self._coverage(function, frame)
        coverage.calls += 1
        pending = coverage.pending()
        repeated = repeatable(function, coverage.calls > 1, coverage.is_method)
        fallbacks = fallback_variables(function, frame.f_locals) if pending or code is self._forward else {}
        coverage.omitted.update(empty_arguments(function, frame.f_locals))
        containers = containers_by_line(function.tree)
        if not (pending or repeated or fallbacks or containers):
            return counts
        ran, shared_lines, last = coverage.ran, function.shared_lines, dict[str, list[Tensor]]()
        decided_on, decided_at = function.decided_on, function.decided_at
        assigning = [branch for branch in {*pending, *repeated} if branch.assigned and branch.span[0]]
        rounds = Rounds(pending, repeated, coverage.space, ran, coverage.seen, self._summarize)
        skips, line = SkipWatch(pending, ran), 0

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal line
            if fallbacks and event != "opcode":
                self._note_fallbacks(coverage, frame, fallbacks, last)
            if event == "line":
                self._count_line()
                before, line = line, frame.f_lineno
                if line in containers:
                    note_contents(coverage.contents, frame, containers[line], self._summarize_items)
                if skips:
                    skips.step(frame.f_lasti, before, line)
                for branch in assigning:
                    first, end = branch.span
                    if first <= before <= end and not first <= line <= end:
                        rounds.leave(frame, branch)
                ran.add(frame.f_lasti)
                rounds.step(frame.f_lasti, line)
                frame.f_trace_opcodes = line in shared_lines
                if line in decided_on:
                    rounds.decide(frame, decided_on[line])
            elif event == "opcode":
                ran.add(frame.f_lasti)
                rounds.step(frame.f_lasti, line)
                if frame.f_lasti in decided_at:
                    rounds.decide(frame, decided_at[frame.f_lasti])
                skips.step(frame.f_lasti, line, line)
            elif event == "exception":
                self._note_error(arg[2])
                skips.interrupt(line)
            elif event == "return":
                skips.step(frame.f_lasti, line, 0)
                rounds.end(frame, function.decided_late, arg)
            return step

        return step

    def _narrow_filled(self, frame: FrameType) -> None:
        """Forget the arguments that hold no tensors in a further call."""
        code, variables = frame.f_code, frame.f_locals
        self.filled[code] = {name for name in self.filled[code] if is_filled(variables.get(name))}
        if not self.filled[code]:
            self._with_filled.discard(id(code))

    def _step_of_loop(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._count_line()
        return self._step_of_loop

    def _enter_unread(self, frame: FrameType) -> Any:
        key = frame.f_code, self._owner(frame)[0]
        if key not in self._unread_in_run:
            self._unread_in_run[key] = UnreadFunction(*key, frame.f_globals)
        return self._unread_in_run[key].tracer(frame)

    def _note_error(self, trace: TracebackType | None) -> None:
        """Note the place of an error, and the functions that it ended on its way to this one."""
        inner = None if trace is None else trace.tb_next
        while trace is not None:
            self._errors_of_run.add((trace.tb_frame.f_code, trace.tb_lineno))
            trace = trace.tb_next
        while inner is not None:
            self._cut_off_in_run.update([code] if self.is_own((code := inner.tb_frame.f_code).co_filename) else [])
            inner = inner.tb_next

    def _note_fallbacks(
        self, coverage: FunctionCoverage, frame: FrameType, fallbacks: Mapping[str, str], last: dict[str, list[Tensor]]
    ) -> None:
        """Note the tensors in variables that replace omitted arguments, if they are new."""
        variables = frame.f_locals
        for name, argument in fallbacks.items():
            held = variables.get(name)
            if isinstance(held, (Tensor, tuple, list, dict)):
                tensors = list(islice(tensors_in(held), MOST_VALUES))
                if list(map(id, tensors)) != list(map(id, last.get(name, ()))):
                    last[name] = tensors
                    either = holds_either(coverage.function.tree, name, argument)
                    own = (t for t in tensors if either or not isinstance(t, nn.Parameter))
                    self._fallbacks += [(coverage, argument, tensor) for tensor in own]
