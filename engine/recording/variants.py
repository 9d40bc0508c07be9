"""Runs that differ from that on the example in something else than sizes: recorded, compared, kept for what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from engine.errors import TraceError
from engine.program.expressions import Guard
from engine.recording.arguments import Arguments, steps_of
from engine.recording.attributes import Setting, Settings, course
from engine.recording.closed import ClosedRecorder
from engine.recording.inputs import NEEDS_DATA
from engine.recording.substitutes import does_the_same, substitutes

__all__ = ["record_arguments", "record_coefficients", "record_settings", "record_substitutes"]


def record_arguments(
    recorder: ClosedRecorder, run: Callable[..., None], arguments: Arguments, first: Any, outputs: Any
) -> None:
    """Record what runs, and what leaves, where numbers, flags and text among the arguments are others.

    Args:
        recorder: with the run on the example.
        run: runs the model with arguments, modules in train mode, and the name of a path.
        arguments: of the example.
        first: the ops and the guards of the run on the example.
        outputs: what left it.
    """
    seen = steps_of(first[0], outputs)

    def record(call: tuple[Any, Any]) -> bool | None:
        mark = recorder.mark()
        try:
            run(*call, [], "other")
        except (*NEEDS_DATA, TraceError):
            recorder.drop(mark)
            return None
        nodes, guards = recorder.since(mark)
        steps = steps_of(nodes, recorder.left(mark))
        if new := recorder.others.add(nodes, guards, kept=not steps <= seen):
            seen.update(steps)
        else:
            recorder.drop(mark)
        return new

    if missing := arguments.record(record):
        names = ", ".join(missing)
        recorder.notes.append(f"Arguments of forward of which only the example's value was recorded: {names}.")


def record_settings(
    recorder: ClosedRecorder, run: Callable[..., None], settings: Settings, first: Any, outputs: Any
) -> None:
    """Record what runs where attributes that code sets later are others.

    Args:
        recorder, first, outputs: as above.
        run: runs the model at a setting.
        settings: the attributes.
    """

    def accepts(setting: Setting) -> bool:
        mark = recorder.mark()
        try:
            run(setting)
        except (*NEEDS_DATA, TraceError):
            recorder.drop(mark)
            return False
        nodes, guards = recorder.since(mark)
        if course(nodes, recorder.left(mark)) == course(first[0], outputs):
            recorder.others.repeat(first[0], nodes)
            recorder.drop(mark)
        else:
            recorder.others.add(nodes, guards, kept=True)
        return True

    missing = settings.record(first[1], accepts)
    if missing:
        recorder.notes.append(
            f"Code sets {', '.join(missing)} later: only what runs at the present value was recorded. "
            "Name what stays in `constants`, or compact once it has its last value."
        )


def record_substitutes(
    recorder: ClosedRecorder, run: Callable[..., None], model: nn.Module, first: Any, outputs: Any
) -> None:
    """Record methods that may run in place of forward, where they compute the same over the same layers.

    Args:
        recorder, run, first, outputs: as above.
        model: has the methods.
    """
    for setting in substitutes(model, first[0]):
        mark = recorder.mark()
        try:
            run(setting)
        except (*NEEDS_DATA, TraceError):
            recorder.drop(mark)
            continue
        nodes, guards = recorder.since(mark)
        if does_the_same(first[0], nodes, outputs, recorder.left(mark)):
            recorder.others.add(nodes, guards, kept=True)
        else:
            recorder.drop(mark)


def record_coefficients(recorder: ClosedRecorder, run: Callable[..., None], guards: Sequence[Guard]) -> list[str]:
    """Record what runs where floats that code compares are others.

    Args:
        recorder, run: as above.
        guards: of a run.

    Returns:
        Notes on what could not be recorded.
    """
    missing: list[str] = []
    for setting in recorder.coefficients.settings(guards):
        mark = recorder.mark()
        try:
            run(setting)
        except (*NEEDS_DATA, TraceError):
            missing += [f"{type(a.module).__name__}.{a.name}" for a, _ in setting]
            recorder.drop(mark)
            continue
        if not recorder.others.add(*recorder.since(mark)):
            recorder.drop(mark)
    names = ", ".join(dict.fromkeys(missing))
    return [f"Code compares {names}: only what runs at the present value was recorded."] if missing else []
