"""What the runs of a model recorded."""

from __future__ import annotations

import torch
from torch import nn

from engine.flow.coverage import CoverageTracer
from engine.observations.recorded_runs import RecordedRuns


def test_there_need_be_no_entries() -> None:
    """Then no code ran in entries alone."""
    coverage = CoverageTracer([], lambda held: held, lambda held: held, lambda frame: ("", False))
    runs = RecordedRuns({"": nn.Linear(1, 1)}, coverage, (), (), (), (), {}, ("weight",))
    assert not runs.of_entries and not coverage.codes_of_entries and not torch.is_tensor(runs)
