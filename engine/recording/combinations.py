"""Conditions that matter only in combination: each run that reaches new code is the start of further runs.

In ``if refine and self.training`` the mode is read only if the argument is true, and neither alone runs the branch.
Each run that evaluates more of a condition is therefore the start of others: in train mode, with other answers to its
decisions on data, at other sizes, and with other values of the arguments, attributes and values outside the model that
the newly reached code names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from engine.alternatives.arguments import Arguments
from engine.alternatives.attributes import Settings, run_signature
from engine.alternatives.data_decisions import Answers, DataDecision
from engine.alternatives.modes import SWITCHES
from engine.alternatives.outer_values import OuterValue, OuterValues
from engine.limits import LEAST_RUNS, MOST_FURTHER_OPS, MOST_STARTS
from engine.program.expressions import Guard
from engine.program.graph import Node
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.resized_runs import record_sizes_of_way
from engine.recording.tape import Mark, Run, repeats
from engine.recording.variants import attempt, record_arguments, record_data_decisions

__all__ = ["Combinations", "Situation"]


_MODE = "training"


@dataclass(frozen=True)
class Situation:
    """How a run differs from the run on the example.

    Attributes:
        args, kwargs: arguments of the call.
        train: modules in train mode.
        setting: values of attributes, and of values outside the model.
        switch: the function of torch that returns the other answer; None if all tell the truth.
        answers: other answers to decisions on data.
    """

    args: Any
    kwargs: Any
    train: tuple[nn.Module, ...] = ()
    setting: tuple[tuple[Any, Any], ...] = ()
    switch: str | None = None
    answers: Answers = field(default_factory=dict)


@dataclass(frozen=True)
class _Start:
    """A run that evaluated something new.

    Attributes:
        situation: in which it ran.
        ran: what was recorded of the run.
        names: names in the code that this run was the first to reach, of whatever can have another value.
        decisions: decisions on data at new places.
        sizes: new decisions by sizes.
        asking: modules that read their mode for the first time.
        outer: values outside of the model.
    """

    situation: Situation
    ran: Run
    names: frozenset[str]
    decisions: Sequence[DataDecision]
    sizes: Sequence[Guard]
    asking: frozenset[int]
    outer: Sequence[OuterValue]


class Combinations:
    """Collects the runs in which code evaluates something new, and records the other outcomes there.

    Args:
        recorder: of all runs.
        run: runs the model in a situation; a second argument names what is varied elsewhere (see `note`).
        model: the model.
        asked: identities of the modules that have read their mode; it grows as the model runs.
        arguments: of the example.
        settings: attributes that code sets.
        outer: values outside of the model.
        dynamic_dims: as for `engine.trace`.
        drops: returns whether a call only drops entries at random (dropout).
    """

    def __init__(
        self,
        recorder: EntryRecorder,
        run: Callable[..., None],
        model: nn.Module,
        asked: set[int],
        arguments: Arguments,
        settings: Settings,
        outer: OuterValues,
        dynamic_dims: Any,
        drops: Callable[[Node], bool],
    ) -> None:
        self._recorder, self._run, self._model, self._asked = recorder, run, model, asked
        self._settings, self._outer, self._dynamic_dims = settings, outer, dynamic_dims
        self._arguments = arguments.names
        self._names = self._arguments | settings.names | SWITCHES.keys() | {_MODE}
        self._drops, self._had_asked = drops, frozenset[int]()
        self._places: set[str] = set()
        self._in_train_mode: list[Sequence[Node]] = []
        self._starts: list[_Start] = []
        self._remaining = 0

    def begin(self) -> tuple[frozenset[int], list[OuterValue]]:
        """Note that the run on the example has ended: whatever it evaluates is varied elsewhere.

        Returns:
            The modules that read their mode, and the values outside the model that it read.
        """
        self._recorder.coverage.take_names()
        self._places |= {decision.place for decision in self._recorder.data_decisions.taken}
        self._had_asked = frozenset(self._asked)
        return self._had_asked, self._outer.new()

    def note(self, situation: Situation, mark: Mark, turned: Collection[str] = ()) -> None:
        """Take note of a run that has just ended.

        Args:
            situation: in which it ran.
            mark: the place in the recording where it begins.
            turned: what is varied elsewhere: "data", "sizes".
        """
        recorder = self._recorder
        ran = recorder.since(mark)
        situation = replace(situation, answers=dict(recorder.data_decisions.answers))
        taken = [] if situation.answers else recorder.data_decisions.taken
        decisions = [decision for decision in taken if decision.place not in self._places]
        self._places |= {decision.place for decision in recorder.data_decisions.taken}
        asking = frozenset(self._asked) - self._had_asked
        self._had_asked |= asking
        names = recorder.coverage.take_names() & self._names
        start = _Start(
            situation,
            ran,
            names,
            [] if "data" in turned else decisions,
            [] if "sizes" in turned else recorder.others.new_decisions(ran.guards),
            frozenset() if situation.train else asking,
            self._outer.new(),
        )
        self._remaining -= len(ran.nodes)
        if situation.train:
            self._in_train_mode.append(ran.nodes)
        if any((start.names, start.decisions, start.sizes, start.asking, start.outer)):
            self._starts.append(start)

    def record(self, in_train_mode: Callable[[Collection[int]], list[nn.Module]], ops: int) -> list[str]:
        """Record the other outcomes in those runs, and in the runs that follow from them.

        Args:
            in_train_mode: returns the modules to run in train mode, given the identities of those that read their mode;
                none if train mode only changes single entries.
            ops: number of ops in the run on the example.

        Returns:
            Notes on what could not be recorded.
        """
        notes: list[str] = []
        self._remaining = max(MOST_FURTHER_OPS, LEAST_RUNS * ops)
        for _ in range(MOST_STARTS):
            if not self._starts or self._remaining < 0:
                break
            start = self._starts.pop(0)
            with self._recorder.data_decisions.answering(start.situation.answers):
                self._turn_modes(start, in_train_mode)
                self._turn_values(start)
            again, answers = functools.partial(self._run, start.situation, ("data",)), start.situation.answers
            notes += record_data_decisions(self._recorder, again, start.decisions, start.ran.nodes, answers)
        if self._starts:
            notes.append(
                f"{len(self._starts)} further runs reach conditions that no other run reaches; the other outcomes of "
                "these were not recorded."
            )
        return notes

    def _turn_modes(self, start: _Start, in_train_mode: Callable[[Collection[int]], list[nn.Module]]) -> None:
        situation = start.situation
        asking = start.asking or (self._had_asked if _MODE in start.names else ())
        if asking and not situation.train and (train := in_train_mode(asking)):
            self._try(replace(situation, train=tuple(train)), start)
        for name in sorted(start.names & SWITCHES.keys()) if situation.switch is None else ():
            self._try(replace(situation, switch=name), start)

    def _turn_values(self, start: _Start) -> None:
        recorder, situation = self._recorder, start.situation
        if sizes := list(filter(recorder.others.is_open, start.sizes)):
            record_sizes_of_way(
                recorder,
                lambda args, kwargs: self._run(replace(situation, args=args, kwargs=kwargs), ("sizes",)),
                (situation.args, situation.kwargs),
                start.ran if recorder.holds_nodes(start.ran.nodes) else replace(start.ran, nodes=()),
                self._dynamic_dims,
                sizes,
            )
        if chosen := start.names & self._arguments:
            others = Arguments(self._model, situation.args, situation.kwargs, lambda name: name not in chosen)
            record_arguments(
                recorder,
                lambda args, kwargs: self._run(replace(situation, args=args, kwargs=kwargs)),
                others,
                start.ran,
            )

        def accepts(setting: Sequence[tuple[Any, Any]]) -> bool:
            return self._try(replace(situation, setting=(*situation.setting, *setting)), start)

        def leads_on() -> bool:
            return recorder.others.took_new_steps

        # the model may accept it in another run; until then, the code behind it has not run
        self._settings.named(start.names).record(start.ran.guards, accepts, leads_on)
        self._outer.record(accepts, start.outer, leads_on)

    def _try(self, situation: Situation, start: _Start) -> bool:
        """Record a run, and keep it if it differs from its start; return whether the model ran."""
        recorder, in_train_mode = self._recorder, list(self._in_train_mode)
        mark = attempt(recorder, functools.partial(self._run, situation))
        if mark is None:
            return False
        ran = recorder.since(mark)
        in_vain = situation.train and any(self._repeats(ran.nodes, run) for run in (start.ran.nodes, *in_train_mode))
        if in_vain and not recorder.reached_new_code():
            recorder.drop(mark)
            return True
        same = run_signature(ran.nodes, ran.outputs) == run_signature(start.ran.nodes, start.ran.outputs)
        if not recorder.others.add(ran.nodes, ran.guards, kept=not same):
            recorder.drop(mark)
        return True

    def _repeats(self, nodes: Sequence[Node], others: Sequence[Node]) -> bool:
        """Whether two runs are the same apart from entries that are dropped at random."""
        one, other = ([node for node in run if not self._drops(node)] for run in (nodes, others))
        return repeats(one, other, shapes=True)
