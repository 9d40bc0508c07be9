"""Runs that differ from the run on the example in something other than sizes; those with anything new are kept."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from engine.alternatives.alternative_forwards import alternative_forwards, is_equivalent
from engine.alternatives.arguments import Arguments, executed_calls
from engine.alternatives.attributes import Attribute, Settings, run_signature, switches_of
from engine.alternatives.data_decisions import Answers, DataDecision, further_answers, turns
from engine.alternatives.mutable_state import MutableState
from engine.alternatives.outer_values import OuterValue, OuterValues
from engine.alternatives.steps import layers_behind
from engine.errors import TraceError
from engine.limits import FRUITLESS_ATTEMPTS, LEAST_RUNS, MOST_FURTHER_OPS
from engine.program.entries import Entry
from engine.program.expressions import Guard
from engine.program.graph import Node
from engine.program.places import shown_place
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.outer_modules import outer_modules
from engine.recording.tape import Mark, Run
from engine.running.inputs import NEEDS_DATA
from engine.source.attribute_writes import assigned_attributes

__all__ = [
    "RecordedWay",
    "attempt",
    "record_arguments",
    "record_coefficients",
    "record_data_decisions",
    "record_entry",
    "record_settings",
    "record_substitutes",
]


_SETTABLE = (type(None), bool, int, float, str, Enum)


def attempt(
    recorder: EntryRecorder, run: Callable[[], None], note_error: Callable[[BaseException], None] | None = None
) -> Mark | None:
    """Record a run.

    Args:
        recorder: the recorder, which keeps nothing of a run that fails.
        run: runs the model.
        note_error: called with the error that ended the run, while the recorder still has what ran before.

    Returns:
        The place in the recording where the run begins; None if the model rejects it.
    """
    mark = recorder.mark()
    try:
        run()
    except (*NEEDS_DATA, TraceError) as error:
        if note_error is not None:
            note_error(error.__cause__ or error)
        recorder.drop(mark)
        return None
    return mark


def record_arguments(recorder: EntryRecorder, run: Callable[..., None], arguments: Arguments, first: Run) -> list[str]:
    """Record the model with other numbers, flags and strings among its arguments.

    Args:
        recorder: the recorder, which already holds the run on the example.
        run: runs the model with positional and keyword arguments.
        arguments: of the example.
        first: the run on the example.

    Returns:
        The arguments of which no other value was recorded.
    """
    seen = executed_calls(first.nodes, first.outputs) | _links(first.nodes)

    def record(call: tuple[Any, Any]) -> bool | None:
        mark = attempt(recorder, functools.partial(run, *call))
        if mark is None:
            return None
        ran = recorder.since(mark)
        steps = executed_calls(ran.nodes, ran.outputs) | _links(ran.nodes)
        if new := recorder.others.add(ran.nodes, ran.guards, kept=not steps <= seen):
            seen.update(steps)
        else:
            recorder.drop(mark)
        return new

    return arguments.record(record)


class RecordedWay(NamedTuple):
    """A way to run the model (in eval mode, in train mode), recorded on the example.

    Attributes:
        run: runs the model in that way, with a setting of values.
        ran: its run on the example.
    """

    run: Callable[..., None]
    ran: Run

    def at(
        self, recorder: EntryRecorder, setting: Any, note_error: Callable[[BaseException], None] | None = None
    ) -> bool:
        """Record the run with a setting, and keep it if it differs; return whether the model ran.

        Args:
            recorder, note_error: as for `attempt`.
            setting: places and their values.
        """
        mark = attempt(recorder, functools.partial(self.run, setting), note_error)
        if mark is None:
            return False
        ran = recorder.since(mark)
        same = run_signature(ran.nodes, ran.outputs) == run_signature(self.ran.nodes, self.ran.outputs)
        if same and not recorder.reached_new_code():
            recorder.others.repeat(self.ran.nodes, ran.nodes)
            recorder.drop(mark)
        else:
            recorder.others.add(ran.nodes, ran.guards, kept=True)
        return True


def record_settings(
    recorder: EntryRecorder,
    way: RecordedWay,
    settings: Settings,
    outer: OuterValues,
    values: Sequence[OuterValue],
    changing: MutableState,
) -> None:
    """Record the model with other values of attributes that code sets later, and of values outside the model.

    Args:
        recorder: as above.
        way: the way in which the model runs on the example.
        settings: the attributes.
        outer: records values outside.
        values: the values that the run on the example read.
        changing: notes which attributes could not be recorded.
    """
    accepts = functools.partial(way.at, recorder)

    def leads_on() -> bool:
        return recorder.others.took_new_steps

    missing = settings.record(way.ran.guards, accepts, leads_on)
    changing.unrecorded = settings.missing
    if missing:
        recorder.notes.append(
            f"Code sets {', '.join(missing)} later, but only the present value was recorded. If it does not change, "
            "name it in `constants`; otherwise compact after the last change."
        )
    if outside := outer.record(accepts, values, leads_on):
        recorder.notes.append(f"Code reads {', '.join(outside)}, but only the present value was recorded.")


def record_substitutes(recorder: EntryRecorder, run: Callable[..., None], model: nn.Module, first: Run) -> None:
    """Record methods that may run in place of forward, if they compute the same with the same layers.

    Args:
        recorder, run, first: as above.
        model: the model that has the methods.
    """
    for setting in alternative_forwards(model, first.nodes):
        mark = attempt(recorder, functools.partial(run, setting))
        if mark is None:
            continue
        ran = recorder.since(mark)
        if is_equivalent(first.nodes, ran.nodes, first.outputs, ran.outputs):
            recorder.others.add(ran.nodes, ran.guards, kept=True)
        else:
            recorder.drop(mark)


def record_coefficients(recorder: EntryRecorder, run: Callable[..., None], guards: Sequence[Guard]) -> list[str]:
    """Record the model with other values of floats that code compares.

    Args:
        recorder, run: as above.
        guards: of a run.

    Returns:
        Notes on what could not be recorded.
    """
    missing: list[str] = []
    for setting in recorder.coefficients.settings(guards):
        mark = attempt(recorder, functools.partial(run, setting))
        if mark is None:
            missing += [f"{type(a.module).__name__}.{a.name}" for a, _ in setting]
            continue
        ran = recorder.since(mark)
        if not recorder.others.add(ran.nodes, ran.guards):
            recorder.drop(mark)
    names = ", ".join(dict.fromkeys(missing))
    return [f"Code compares {names}, but only the present value was recorded."] if missing else []


def record_data_decisions(
    recorder: EntryRecorder,
    run: Callable[[], None],
    taken: Sequence[DataDecision],
    nodes: Sequence[Node],
    answers: Answers | None = None,
) -> list[str]:
    """Record the model with other outcomes of its decisions on data, one at a time, and of decisions that follow.

    Once two other answers at one place in the code have led to nothing new, no further ones are tried.

    Args:
        recorder: as above.
        run: runs the model as it ran before.
        taken: the decisions of that run.
        nodes: the ops of that run.
        answers: other answers in that run.

    Returns:
        Notes on what could not be recorded.
    """
    if not taken:
        return []
    seen, remaining = _links(nodes), max(MOST_FURTHER_OPS, LEAST_RUNS * len(nodes))
    waiting: list[tuple[dict[Any, Any], list[DataDecision]]] = [(dict(answers or {}), list(taken))]
    places, fruitless, left_out = set[str](), Counter[str](), dict[str, None]()
    while waiting:
        before, taken = waiting.pop(0)
        new = deque(turns(taken, places))
        places |= {decision.place for decision in taken}
        alternatives = Counter(place for place, answers in new if min(nth for _, nth, _ in answers) == 0)
        while new:
            place, answers = new.popleft()
            if fruitless[place] >= FRUITLESS_ATTEMPTS * alternatives[place]:
                continue
            if remaining < 0:
                left_out[place] = None
                continue
            mark, turned = recorder.mark(), {**before, **answers}
            try:
                with recorder.data_decisions.answering(turned):
                    run()
            except (*NEEDS_DATA, TraceError):
                remaining -= len(recorder.since(mark).nodes)
                recorder.drop(mark)
                fruitless[place] += 1
                continue
            ran = recorder.since(mark)
            remaining -= len(ran.nodes)
            if (links := _links(ran.nodes)) <= seen and not recorder.reached_new_code():
                recorder.drop(mark)
                fruitless[place] += 1
            else:
                seen |= links
                recorder.others.add(ran.nodes, ran.guards, kept=True)
                fruitless[place] = 0
                new.extendleft([(place, further) for further in further_answers(answers, taken)])
            waiting.append((turned, list(recorder.data_decisions.taken)))
    names = ", ".join(map(shown_place, left_out))
    return [f"Decisions on data that were recorded only with the example's outcome: {names}."] if names else []


def _links(nodes: Sequence[Node]) -> set[tuple[Any, ...]]:
    """Return, for each call, the calls whose results it reads, with the layers behind them, and its weights."""
    calls = {n.index: (n.module, n.op, switches_of(n), None if n.site is None else n.site.spot) for n in nodes}
    behind = layers_behind(nodes)
    links: set[tuple[Any, ...]] = set()
    for node in nodes:
        for position, value in enumerate(node.inputs):
            source: Any = value.name
            if value.producer is not None:
                source = calls.get(value.producer, ""), behind.get(value.index)
            links.add((calls[node.index], position, source))
    return links


# ---------------------------------------------------------------- entries


def record_entry(recorder: EntryRecorder, run: Callable[..., None], entry: Entry, model: nn.Module) -> Iterator[Entry]:
    """Record an entry, also with other arguments, and with other values of attributes that code sets later.

    Args:
        recorder: with the runs of forward.
        run: records an entry, optionally with a setting of values outside the model.
        entry: the entry to record.
        model: the model that is traced.

    Yields:
        The entry, and each variant of it in which something else runs, or may run afterwards.
    """
    attributes = [] if entry.explored else _attributes(entry, model)
    settings = Settings(attributes, {a.owner: a.module for a in attributes})
    mark = recorder.mark()
    with settings.watching():
        run(entry)
    yield replace(entry, others={}, explored=True)
    first, taken = recorder.since(mark), recorder.data_decisions.taken
    recorder.notes += record_data_decisions(recorder, lambda: run(entry), taken, first.nodes)
    runs = _Runs(first)
    kept: list[Entry] = []

    def accepts(way: Entry, setting: Any = ()) -> bool:
        mark = attempt(recorder, functools.partial(run, way, setting))
        new = False
        if mark is not None:
            new = runs.add(recorder.since(mark))
            new |= way.after is not None  # which may behave differently then, although the entry does not
            if not new:
                recorder.drop(mark)
        if new and not setting:
            kept.append(replace(way, explored=True))
        elif not new:
            recorder.on_data.discard(way.name)
        return mark is not None

    for way in entry.ways():
        accepts(way)
    arguments, numbers = Arguments(model, entry.args, entry.kwargs, call=entry.call), itertools.count(1)
    for calls in () if entry.explored else arguments.lengths():
        for args, kwargs in calls:
            name = f"{entry.name}, other lengths {next(numbers)}"
            way = replace(entry, args=args, kwargs=kwargs, others={}, name=name)
            with nullcontext() if entry.name in recorder.on_data else recorder.without_data():
                if not accepts(way):
                    break

    def accepts_at(setting: Sequence[tuple[Attribute, Any]]) -> bool:
        return accepts(entry.at([(attribute.module, attribute.name, value) for attribute, value in setting]))

    missing = settings.record(first.guards, accepts_at)
    if not entry.explored:
        outer = OuterValues(model, recorder.coverage)
        elsewhere = replace(entry, name=f"{entry.name}, at other values")  # no way that the certificate runs
        missing += outer.record(lambda setting: accepts(elsewhere, setting), outer.new())
    if missing:
        recorder.notes.append(f"{entry.name!r} was recorded only at the present value of {', '.join(missing)}.")
    yield from kept


def _attributes(entry: Entry, model: nn.Module) -> list[Attribute]:
    """Return the attributes of the model itself, and of modules around it, that code sets later."""
    outer = outer_modules((entry.call, entry.args, dict(entry.kwargs)), model)
    return [
        Attribute(type(root).__name__ if place else "", root, name)
        for place, root in enumerate([model, *outer])
        for name, value in vars(root).items()
        if isinstance(value, _SETTABLE) and name not in entry.fixed and name in assigned_attributes(root)[type(root)]
    ]


class _Runs:
    """The sequences of ops that runs of an entry take, each with the numbers of at most two runs."""

    def __init__(self, first: Run) -> None:
        self._courses = [(run_signature(first.nodes, first.outputs), [_numbers(first.nodes)])]

    def add(self, run: Run) -> bool:
        """Whether a run takes a new sequence of ops, or is the first to repeat one with other numbers."""
        own, numbers = run_signature(run.nodes, run.outputs), _numbers(run.nodes)
        for other, seen in self._courses:
            if own == other:
                if len(seen) > 1 or numbers in seen:
                    return False
                seen.append(numbers)
                return True
        self._courses.append((own, [numbers]))
        return True


def _numbers(nodes: Sequence[Node]) -> list[Any]:
    return [[repr(arg) for arg in node.args.values() if isinstance(arg, (bool, int, float))] for node in nodes]
