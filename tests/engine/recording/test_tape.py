"""What was written down can be taken back."""

from __future__ import annotations

import torch
from torch import nn

from engine.recording.recorder import Recorder


def recorded(model: nn.Module) -> Recorder:
    """A recorder with one run."""
    recorder = Recorder(model, None)
    record(recorder, model)
    return recorder


def record(recorder: Recorder, model: nn.Module, size: int = 2, path: str = "eval") -> None:
    """Add a run."""
    recorder.run(lambda args, kwargs: model(*args), (torch.ones(size, 3),), {}, [""], path)


def test_what_is_dropped_leaves_nothing() -> None:
    """The program is that of the first run again: nodes, values, inputs, outputs and stored tensors."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    recorder = recorded(model)
    mark, before = recorder.mark(), recorder.graph(model, (), {})
    record(recorder, model, path="other")
    ran = recorder.since(mark)
    assert len(ran.nodes) == len(before.nodes) and ran.inputs and ran.outputs
    recorder.drop(mark)
    after = recorder.graph(model, (), {})
    assert (after.nodes, after.values, after.inputs, after.outputs) == (
        before.nodes,
        before.values,
        before.inputs,
        before.outputs,
    )


def test_a_run_that_repeats_the_first_is_dropped() -> None:
    """Of the same ops; with ``shapes``, only where these are the same too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    for size, shapes, stays in ((2, True, False), (5, True, True), (5, False, False)):
        recorder = recorded(model)
        mark = recorder.mark()
        record(recorder, model, size, "other")
        recorder.drop_if_repeated(mark, shapes)
        assert bool(recorder.since(mark).nodes) is stays
