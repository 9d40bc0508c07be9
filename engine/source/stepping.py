"""Which instructions of the user's functions run, and what their variables hold where they decide."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from engine.program.trees import tensors_in
from engine.source.branches import Branching, Part, branching
from engine.source.omitted import stand_ins
from engine.source.sites import is_library

__all__ = ["Course", "Steps"]

_MOST = 200
_PACKAGES = {"site-packages", "dist-packages"}
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_ENGINE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@functools.cache
def _foreign(file: str) -> bool:
    """Whether a file is not part of the user's project: torch's, Python's, the engine's, or a package's."""
    return is_library(file) or file.startswith((_ENGINE, _LIBRARY)) or not _PACKAGES.isdisjoint(Path(file).parts)


@dataclass
class Course:
    """What ran of a function, in all calls of it for one module.

    Attributes:
        function: the function.
        owner: name of the module.
        is_method: whether the module is its first argument.
        space: globals.
        ran: instructions.
        seen: what variables held where parts were decided, by part and name.
        absent: what took the place of arguments that were None, by name.
        missing: arguments that were None.
    """

    function: Branching
    owner: str
    is_method: bool
    space: Mapping[str, Any]
    ran: set[int] = field(default_factory=set)
    seen: dict[Part, dict[str, list[Any]]] = field(default_factory=dict)
    absent: dict[str, list[Any]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def merge(self, other: Course) -> None:
        """Take over what ran in another run."""
        self.ran |= other.ran
        self.missing |= other.missing
        for part, names in other.seen.items():
            for name, kept in names.items():
                own = self.seen.setdefault(part, {}).setdefault(name, [])
                own += [k for k in kept if k not in own]
        for name, kept in other.absent.items():
            self.absent.setdefault(name, []).extend(kept)

    def pending(self) -> list[Part]:
        """Return the parts that did not run yet."""
        return [part for part in self.function.parts if self.ran.isdisjoint(part.offsets)]


class Steps:
    """Watches functions outside of torch that decide something, by a trace function; a debugger's is set aside.

    A run that raises leaves nothing.

    Args:
        files: those of packages whose functions are watched too.
        held: gives what is kept of an object that a variable holds, or None.
        owner: gives the name of the module that a call belongs to, and whether that is its first argument.
        entry: the code of forward, which is watched in any case.
        stored: gives the tensor that a tensor is recorded as.

    Attributes:
        courses: what ran, by function and module.
    """

    def __init__(
        self,
        files: Container[str],
        held: Callable[[Any], Any],
        owner: Callable[[FrameType], tuple[str, bool]],
        entry: CodeType | None = None,
        stored: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._files, self._held, self._owner, self._entry, self._stored = files, held, owner, entry, stored
        self._stand_ins: list[tuple[Course, str, Tensor]] = []
        self._functions: dict[int, tuple[CodeType, Branching | None]] = {}
        self.courses: dict[tuple[CodeType, str], Course] = {}
        self._run: dict[tuple[CodeType, str], Course] = {}
        self._watches, self._away = False, 0
        self._ignored: set[int] = set()  # identities of code, which is kept above, of which nothing is watched
        self._trace = self._tracer()

    def _tracer(self) -> Callable[[FrameType, str, Any], Any]:
        """Return a trace function, which runs for each call of Python code."""
        ignored, call = self._ignored, self._call

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            return None if id(frame.f_code) in ignored else call(frame)

        return trace

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs."""
        self._run, self._watches, self._away, prior = {}, True, 0, sys.gettrace()
        self._stand_ins = []
        sys.settrace(self._trace)
        try:
            yield
        finally:
            self._watches = False
            sys.settrace(prior)
        for course, name, value in self._stand_ins:
            kept = self._held(self._stored(value))
            course.absent.setdefault(name, []).extend([] if kept is None else [kept])
        self._stand_ins = []
        for key, course in self._run.items():
            if key in self.courses:
                self.courses[key].merge(course)
            else:
                self.courses[key] = course

    def pause(self) -> None:
        """Stop watching: what follows is not the user's code."""
        if self._watches:
            self._away += 1
            if self._away == 1:
                sys.settrace(None)

    def resume(self) -> None:
        """Watch again."""
        if self._watches:
            self._away -= 1
            if not self._away:
                sys.settrace(self._trace)

    def _course(self, function: Branching, frame: FrameType) -> Course:
        owner, is_method = self._owner(frame)
        key = function.code, owner
        if key not in self._run:
            course = self._run[key] = Course(function, owner, is_method, frame.f_globals)
            course.ran |= self.courses[key].ran if key in self.courses else set()
        return self._run[key]

    def _function(self, code: CodeType) -> Branching | None:
        """Return what of a function is watched; None where that is nothing."""
        file = code.co_filename
        own = not is_library(file) and (file in self._files or not _foreign(file))
        function = branching(code, code is self._entry) if own else None
        self._functions[id(code)] = code, function
        if function is None:
            self._ignored.add(id(code))
        return function

    def _call(self, frame: FrameType) -> Any:
        code = frame.f_code
        entry = self._functions.get(id(code))  # the hash of code takes longer than all else
        function = self._function(code) if entry is None else entry[1]
        if function is None:
            return None
        course = self._course(function, frame)
        pending = course.pending()
        absent = stand_ins(function, frame.f_locals) if pending or code is self._entry else {}
        course.missing.update(absent.values())
        if not (pending or absent):
            return None
        ran, shared, points, last = course.ran, function.shared, function.points, dict[str, list[Tensor]]()

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if absent and event != "opcode":
                self._fill(course, frame, absent, last)
            if event == "line":
                line = frame.f_lineno
                ran.add(frame.f_lasti)
                frame.f_trace_opcodes = line in shared
                if line in points:
                    self._look(course, frame, points[line])
            elif event == "opcode":
                ran.add(frame.f_lasti)
            elif event == "return":
                self._look(course, frame, function.late, late=True)
            return step

        return step

    def _fill(self, course: Course, frame: FrameType, absent: Mapping[str, str], last: dict[str, list[Tensor]]) -> None:
        """Note what variables hold by now, if they did not before, that take the place of arguments."""
        variables = frame.f_locals
        for name, argument in absent.items():
            held = variables.get(name)
            if isinstance(held, (Tensor, tuple, list, dict)):
                tensors = list(islice(tensors_in(held), _MOST))
                if list(map(id, tensors)) != list(map(id, last.get(name, ()))):
                    last[name] = tensors
                    self._stand_ins += [(course, argument, tensor) for tensor in tensors]

    def _look(self, course: Course, frame: FrameType, parts: Sequence[Part], late: bool = False) -> None:
        """Note what variables hold before parts that did not run."""
        for part in parts:
            if not course.ran.isdisjoint(part.offsets):
                continue
            seen, variables = course.seen.setdefault(part, {}), frame.f_locals
            single = late and isinstance(part.test, ast.expr)
            for name in part.targets if single else part.names | part.targets if late else part.names:
                kept = self._held(variables.get(name)) if name in variables else None
                values = seen.setdefault(name, [])
                if kept is not None and kept not in values and len(values) < _MOST:
                    values.append(kept)
