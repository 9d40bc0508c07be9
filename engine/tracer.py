"""Record what a model does: model + example inputs -> `Graph`.

A `TorchDispatchMode` watches the model's real forward on fake tensors under ``inference_mode``, where composite ops
stay whole (``linear``, ``conv2d``, ``batch_norm``). Any Python control flow works, no weight is copied, and the model
is not changed. If the forward depends on data, the same recorder runs on the real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.alternatives.arguments import Arguments
from engine.alternatives.attributes import Attribute, Settings
from engine.alternatives.axes import axes_of
from engine.alternatives.modes import Calls, Switches, may_differ, watched
from engine.alternatives.mutable_state import MutableState
from engine.alternatives.outer_values import OuterValue, OuterValues
from engine.bounds import as_names, check_kinds
from engine.errors import TraceError
from engine.numbers.integers import tagged
from engine.numbers.sizes import Size
from engine.ops.calls import FUNCTIONS
from engine.ops.draws import drops_entries, entrywise
from engine.ops.opaque import LITERAL
from engine.ops.results import layout_of_result
from engine.ops.spread import separate_layers
from engine.program.defaults import own_defaults
from engine.program.entries import Entry, entries_of
from engine.program.expressions import AttributeOf
from engine.program.garbage import uncollected
from engine.program.graph import Graph
from engine.program.stored import distinct_modules, settled
from engine.program.trees import tensors_in
from engine.recording.combinations import Combinations, Situation
from engine.recording.deciding_attributes import record_deciding_attributes
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.outer_modules import module_stack, preserving_outer_modules
from engine.recording.recorder import Recorder
from engine.recording.resized_runs import record_other_sizes, record_sizes_of_way
from engine.recording.tape import Run
from engine.recording.train_mode import modules_needing_train_mode
from engine.recording.variants import (
    RecordedWay,
    record_arguments,
    record_coefficients,
    record_data_decisions,
    record_entry,
    record_settings,
    record_substitutes,
)
from engine.running.caches import bypassing_caches
from engine.running.evaluation import Contents, evaluating, preserving_buffers, sharing_contents
from engine.running.fakes import Fakes
from engine.running.inputs import (
    NEEDS_DATA,
    call_entry,
    call_model,
    check_model,
    larger_inputs,
    recording_error,
    resolve_inputs,
)
from engine.running.process import EXCLUSIVE, seeded, silenced
from engine.running.scripted import unscripted
from engine.surgery.kinds.attention import headwise, shape_free
from engine.surgery.kinds.norms import plain_norms, spans_of

__all__ = ["trace"]

_UNSEEN = "The train path was not recorded."


def _size_of(module: str, name: str, number: int) -> Size:
    return Size(number, AttributeOf(module, name))


@contextmanager
def _recording(
    recorder: Recorder,
    model: nn.Module,
    opaque: Collection[str],
    train: Sequence[nn.Module],
    arguments: Any,
    contents: Contents | None = None,
) -> Iterator[list[str]]:
    """Prepare a model for a recorded run inside the context; yield the stack of names of the running modules."""
    modules = distinct_modules(model)
    names = {id(m): n for n, m in modules.items()}
    stack = [""]
    with ExitStack() as scope:
        scope.enter_context(evaluating(model, train, arguments, contents))
        scope.enter_context(seeded())  # random decisions are the same in each run
        scope.enter_context(silenced("torch._subclasses.fake_tensor"))  # logs errors that are raised anyway
        for exchanged in (bypassing_caches, headwise, plain_norms, unscripted):
            scope.enter_context(exchanged(model))
        scope.enter_context(module_stack(names, stack, recorder, opaque))
        scope.enter_context(torch.inference_mode())
        recorder.coefficients.track()
        for name, m in modules.items():
            vars(m).update(tagged(m, functools.partial(_size_of, name)))
        yield stack


def _run(
    recorder: Recorder,
    model: nn.Module,
    opaque: Collection[str],
    args: Any,
    kwargs: Any,
    train: Sequence[nn.Module],
    path: str,
    setting: Any = (),
    contents: Contents | None = None,
) -> None:
    with _recording(recorder, model, opaque, train, (args, kwargs), contents) as stack, _with_setting(setting):
        recorder.run(lambda a, k: call_model(model, a, k), args, kwargs, stack, path)


@contextmanager
def _with_setting(setting: Sequence[tuple[Attribute | OuterValue, Any]]) -> Iterator[None]:
    """Give attributes and outer values other values inside the context."""
    with ExitStack() as scope:
        for place, value in setting:
            scope.enter_context(place.holding(value))
        yield


def _run_entry(
    recorder: EntryRecorder, model: nn.Module, opaque: Collection[str], entry: Entry, setting: Any = ()
) -> None:
    """Record an entry; on real data if it needs their numbers.

    Raises:
        TraceError: naming the entry, if it does not run.
    """
    train = may_differ(model) if entry.training else []
    arguments = (entry.args, dict(entry.kwargs))
    for fake in (True, False):
        mark = recorder.mark()
        try:
            with (
                preserving_outer_modules(entry, model),
                _recording(recorder, model, opaque, train, arguments) as stack,
                _with_setting(setting),
            ):
                recorder.run_entry(
                    lambda a, k: call_entry(entry, a, k), entry.args, entry.kwargs, stack, entry.name, fake=fake
                )
            return
        except (*NEEDS_DATA, TraceError):
            recorder.drop(mark)
            if not fake or recorder.real or not recorder.may_take_data:
                raise


def _run_entries(recorder: EntryRecorder, model: nn.Module, opaque: Collection[str], entries: Sequence[Entry]) -> None:
    for entry in entries:
        run = functools.partial(_run_entry, recorder, model, opaque)
        recorder.entries += record_entry(recorder, run, entry, model)


def _record(
    model: nn.Module,
    inputs: list[tuple[Any, Any]],
    opaque: Collection[str],
    changing: MutableState,
    fake: bool,
    dynamic_dims: Any,
    entries: Sequence[Entry] = (),
) -> EntryRecorder:
    recorder = EntryRecorder(model, Fakes(layout_of_result) if fake else None, LITERAL, changing)
    with watched(may_differ(model)) as asked:
        _record_forward(recorder, model, inputs, opaque, changing, dynamic_dims, asked)
    _run_entries(recorder, model, opaque, entries)
    return recorder


def _record_forward(
    recorder: EntryRecorder,
    model: nn.Module,
    inputs: list[tuple[Any, Any]],
    opaque: Collection[str],
    changing: MutableState,
    dynamic_dims: Any,
    asked: set[int],
) -> None:
    """Record the model on the example and in all other ways; ``asked`` collects the modules that read their mode."""
    start = recorder.mark()
    candidates, switches, calls = may_differ(model), Switches(model), Calls()
    settings, outer = Settings(changing.attributes, distinct_modules(model)), OuterValues(model, recorder.coverage)
    contents, example = Contents(model, inputs[0]), Situation(*inputs[0])

    def run_in(situation: Situation, turned: Collection[str] = (), path: str | None = None) -> None:
        mark, (args, kwargs) = recorder.mark(), (situation.args, situation.kwargs)
        path = path or ("train, other" if situation.train else "other")
        further = situation.train, path, situation.setting, contents
        with nullcontext() if situation.switch is None else switches.answering(otherwise=situation.switch):
            try:
                _run(recorder, model, opaque, args, kwargs, *further)
            except NEEDS_DATA:  # though the example does not
                if recorder.real:
                    raise
                recorder.drop(mark)
                with recorder.on_data_alone(), preserving_buffers(model):
                    _run(recorder, model, opaque, args, kwargs, *further)
        combinations.note(situation, mark, turned)

    arguments = Arguments(model, *inputs[0], changing.declared)
    combinations = Combinations(recorder, run_in, model, asked, arguments, settings, outer, dynamic_dims, drops_entries)
    with switches.answering(), calls.of(candidates), settings.watching():
        _run(recorder, model, opaque, *inputs[0], [], "eval", contents=contents)
    seen, read_outside = combinations.begin()
    first = recorder.since(start)
    if len(first.inputs) != sum(1 for _ in tensors_in(inputs[0])):
        first = replace(first, inputs=())
    by_default = _way_of(run_in, example, first)
    recorder.notes += record_data_decisions(
        recorder, functools.partial(run_in, example, ("data",)), recorder.data_decisions.taken, first.nodes
    )
    train = modules_needing_train_mode(
        recorder.another, model, [m for m in candidates if id(m) in seen], calls, entrywise, contents
    )
    in_train = replace(example, train=tuple(m for m in candidates if id(m) not in seen or m in train))
    by_switch = [replace(example, switch=switch) for switch in sorted(switches.asked)]
    ways = _record_ways(recorder, run_in, [*([in_train] if train else []), *by_switch])

    def with_inputs(situation: Situation) -> Callable[..., None]:
        return lambda args, kwargs: run_in(replace(situation, args=args, kwargs=kwargs))

    record_other_sizes(recorder, with_inputs(example), inputs, first, dynamic_dims)
    for situation, way in ways:
        record_sizes_of_way(recorder, with_inputs(situation), inputs[0], way.ran, dynamic_dims)
    if missing := record_arguments(recorder, with_inputs(example), arguments, first):
        names = ", ".join(missing)
        recorder.notes.append(f"Only the example's value of these arguments of forward was recorded: {names}.")
    record_settings(recorder, by_default, settings, outer, read_outside, changing)
    unread = functools.partial(recorder.assumptions, *inputs[0], FUNCTIONS)
    record_deciding_attributes(recorder, by_default, distinct_modules(model), changing, unread)
    record_substitutes(recorder, by_default.run, model, first)
    for way in (by_default, *(way for situation, way in ways if situation.switch is None)):
        recorder.notes += record_coefficients(recorder, way.run, way.ran.guards)

    def in_train_mode(asking: Collection[int]) -> list[nn.Module]:
        needed = modules_needing_train_mode(
            recorder.another, model, [m for m in candidates if id(m) in asking], calls, entrywise, contents
        )
        return [m for m in candidates if id(m) not in asked or m in train or m in needed] if needed else []

    recorder.notes += combinations.record(in_train_mode, len(first.nodes))


def _record_ways(
    recorder: EntryRecorder, run_in: Callable[..., None], situations: Sequence[Situation]
) -> list[tuple[Situation, RecordedWay]]:
    """Record other ways to run the model, each with its decisions on data; return those that the model accepts."""
    ways: list[tuple[Situation, RecordedWay]] = []
    for situation in situations:
        mark = recorder.mark()
        try:
            run_in(situation, ("data", "sizes"), "train" if situation.train else None)
            way = _way_of(run_in, situation, recorder.since(mark))
            ways.append((situation, way))
            taken = recorder.data_decisions.taken
            recorder.drop_if_repeated(mark, shapes=True)
            again = functools.partial(run_in, situation, ("data",))
            recorder.notes += record_data_decisions(recorder, again, taken, way.ran.nodes)
        except TraceError as error:  # a detector, say, needs targets in train mode: note it, and go on
            recorder.drop(mark)
            recorder.notes.append(f"{_UNSEEN} {error}")
    return ways


def _way_of(run_in: Callable[..., None], situation: Situation, ran: Run) -> RecordedWay:
    def run(setting: Any = ()) -> None:
        run_in(replace(situation, setting=(*situation.setting, *setting)))

    return RecordedWay(run, ran)


def _settled(
    model: nn.Module,
    inputs: list[tuple[Any, Any]],
    opaque: Collection[str],
    constants: Collection[str] | None,
    dynamic_dims: Any,
    entries: Sequence[Entry],
) -> tuple[EntryRecorder, bool]:
    """Record the model, and again if a run writes to what was taken for constant; return as `_recorded` does."""
    changing = MutableState(model, inputs[0], constants, opaque)
    recorded = functools.partial(_recorded, model, inputs, opaque, changing, dynamic_dims, entries)
    recorder, decided = recorded()
    return recorded() if recorder.written_constants() else (recorder, decided)


def _recorded(
    model: nn.Module,
    inputs: list[tuple[Any, Any]],
    opaque: Collection[str],
    changing: MutableState,
    dynamic_dims: Any,
    entries: Sequence[Entry],
) -> tuple[EntryRecorder, bool]:
    """Record without data, or on data if the model decides by them; return the recorder, and whether it used data.

    An op may also reject tensors without data, for example because of their dtype; real data then show what it does.
    """
    try:
        recorder = _record(model, inputs, opaque, changing, True, dynamic_dims)
    except (*NEEDS_DATA, TraceError):
        if changing.forgo_tables():  # it may only read the numbers of a table
            return _recorded(model, inputs, opaque, changing, dynamic_dims, entries)
        with preserving_buffers(model):
            try:
                return _record(model, inputs, opaque, changing, False, dynamic_dims, entries), True
            except TraceError as error:
                raise recording_error(error, model, *inputs[0]) from error.__cause__
    _run_entries(recorder, model, opaque, entries)
    return recorder, False


@uncollected()
@sharing_contents()
@own_defaults()
def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    constants: str | Collection[str] | None = None,
    dynamic_dims: Any = None,
    entries: Mapping[str, Any] | Sequence[Any] | None = None,
    explore: bool = False,
    opaque: str | Collection[str] = (),
    spread: Mapping[str, int] | None = None,
) -> Graph:
    """Record the forward pass of a model.

    Args:
        model: any module; it is left exactly as it was (weights, buffers, modes, random state).
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        constants: names of buffers and attributes, or patterns of them (``"*.scale"``), to take for constant although
            code may write to them, or their values look like settings; or of arguments of a forward
            (``"*.output_hidden_states"``) that have the example's value in every call.
        dynamic_dims: which dimensions of the inputs may have other sizes, much as for `torch.export`: for each
            argument, by position (a tuple or list) or by name (a mapping), a set of dimensions, a dictionary from
            dimensions to names (dimensions of one name have the same size), or None if its sizes are fixed. By default
            all dimensions that the model accepts at another size.
        entries: further ways in which the model is run (a training step, a method that users call, a penalty over
            parameters), by name: each an `engine.Entry`, a callable, or a tuple ``(callable, args, kwargs)``. What an
            entry reads is kept or adapted; the certificate compares what it returns.
        explore: whether to record a larger resolution too, if it takes another path through the code.
        opaque: names of modules that are recorded as one node each, whatever they do inside.
        spread: layers whose channels are separate from those of their consumers, with the channel dimension of their
            output.

    Returns:
        The recorded program, including branches that only run in train mode, such as auxiliary heads.

    Raises:
        InputError: if the model is not a module, or the example inputs contain no tensor or lack a declared dimension.
        TraceError: if the model rejects the example inputs, or an entry, which is named, cannot be recorded.

    Example:
        >>> graph = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8))
        >>> [node.op for node in graph.nodes]
        ['conv2d', 'relu']
    """
    check_kinds(trace, locals())
    check_model(model)
    args, kwargs = resolve_inputs(example_inputs)
    further = entries_of(entries)
    axes_of(args, kwargs, dynamic_dims)
    constants, opaque = as_names("constants", constants), as_names("opaque", opaque)
    inputs = [(args, kwargs), *([larger_inputs(args, kwargs)] if explore else [])]
    with EXCLUSIVE, settled(model):
        with separate_layers(model, spread or {}):
            recorder, decided = _settled(model, inputs, opaque, constants, dynamic_dims, further)
            recorder.assume_unreached(args, kwargs, FUNCTIONS)
        graph = replace(
            recorder.graph(model, args, kwargs),
            explored=explore,
            constants=constants or None,
            dynamic_dims=dynamic_dims,
            decided=decided,
            entries=tuple(recorder.entries),
            on_data=frozenset(recorder.on_data),
            opaque=opaque,
            headwise=frozenset(name for name, module in distinct_modules(model).items() if shape_free(module)),
            spans=spans_of(model),
            spread=dict(spread or {}),
            attention=getattr(model, "attention_units", "heads"),
        )
    graph.verify()
    return graph
