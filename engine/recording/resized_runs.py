"""Runs at sizes other than the example's, recorded and kept if they reach new code.

The sizes to try are derived from the comparisons in the code: see `engine.alternatives.other_sizes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from engine.alternatives.axes import axes_of, resized
from engine.alternatives.other_sizes import reads_sizes
from engine.errors import TraceError
from engine.program.expressions import Guard
from engine.recording.entry_recorder import EntryRecorder, TooLargeError
from engine.recording.tape import Run

__all__ = ["record_other_sizes", "record_sizes_of_way"]

_UNSEEN = "No larger resolution was recorded, which matters where the code takes another path there."


def _record_at(recorder: EntryRecorder, run: Callable[..., None], args: Any, kwargs: Any) -> TraceError | None:
    """Record a run with other inputs, and keep it if it reaches new code; return the error if it fails."""
    mark = recorder.mark()
    try:
        run(args, kwargs)
    except TooLargeError as error:  # this says nothing about what the model accepts
        recorder.drop(mark)
        return error
    except TraceError as error:
        ran = recorder.since(mark)
        recorder.others.reject(ran.guards)
        if not recorder.real:
            recorder.others.rejections.note(error, ran.nodes, ran.guards, ran.inputs)
        recorder.drop(mark)
        return error
    ran = recorder.since(mark)
    if not recorder.others.add(ran.nodes, ran.guards):
        recorder.drop(mark)
    return None


def record_other_sizes(
    recorder: EntryRecorder, run: Callable[..., None], inputs: list[tuple[Any, Any]], first: Run, dynamic_dims: Any
) -> None:
    """Record runs at other sizes; a run on data only covers its own sizes."""
    record = functools.partial(_record_at, recorder, run)
    recorder.others.start(first.nodes, first.guards, first.inputs)
    rejected = [error for error in (record(*other) for other in inputs[1:]) if error is not None]
    recorder.notes += [f"{_UNSEEN} {error}" for error in rejected]
    if reads_sizes(first.guards):
        axes = axes_of(*inputs[0], dynamic_dims)
        larger = len(inputs) > 1 and not rejected
        recorder.others.explore(axes, lambda sizes: record(*resized(*inputs[0], sizes)) is None, larger)


def record_sizes_of_way(
    recorder: EntryRecorder,
    run: Callable[..., None],
    example: tuple[Any, Any],
    ran: Run,
    dynamic_dims: Any,
    decisions: Sequence[Guard] | None = None,
) -> None:
    """Record another way to run the model at the sizes that only it decides by, and at sizes that reached new code.

    Args:
        recorder: the recorder, with the runs at other sizes of the default way to run the model.
        run: runs the model in that way.
        example: the example inputs.
        ran: the run on these.
        dynamic_dims: as for `trace`.
        decisions: the decisions by sizes to explore; by default those that no earlier run has taken.
    """
    record = functools.partial(_record_at, recorder, run)
    others = recorder.others
    decides = others.begin_way(ran.nodes, ran.guards, decisions)
    for sizes in tuple(others.with_new_code):
        record(*resized(*example, sizes))
    if decides:
        axes = axes_of(*example, dynamic_dims)
        others.explore(axes, lambda sizes: record(*resized(*example, sizes)) is None, False)
