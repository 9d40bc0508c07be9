"""Tests of when things happen in a fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_compress.callbacks.timing import Timing
from lightning_compress.trainer.packages import MisconfigurationException


def a_trainer(**options: Any) -> Any:
    """What the window depends on: five epochs of ten batches."""
    known = {
        "fast_dev_run": 0,
        "max_epochs": 5,
        "max_steps": -1,
        "num_training_batches": 10,
        "accumulate_grad_batches": 1,
        "estimated_stepping_batches": 50,
        "lightning_module": SimpleNamespace(automatic_optimization=True),
    }
    return SimpleNamespace(**{**known, **options})


@pytest.mark.parametrize(
    ("timing", "window"),
    [
        (Timing(), (0, 4)),
        (Timing(start=1, cool_down=2), (1, 3)),
        (Timing(cool_down=0), (0, 5)),
        (Timing(unit="step"), (0, 40)),
        (Timing(unit="step", start=5, cool_down=15), (5, 35)),
        (Timing(unit="step", end=7), (0, 7)),
        (Timing(early=1), (1, 4)),
        (Timing(unit="step", early=1), (10, 40)),
    ],
)
def test_window(timing: Timing, window: tuple[int, int]) -> None:
    """From the start to one epoch before the end, or as given, by epochs and by steps."""
    assert timing.window(a_trainer()) == window


def test_one_epoch_leaves_nothing_to_gather_in() -> None:
    """A criterion that needs a first epoch for its statistics cannot prune in a fit of one."""
    with pytest.raises(MisconfigurationException, match="`start=1` .the criterion first collects statistics.*`end`"):
        Timing(early=1).window(a_trainer(max_epochs=1))


def test_twenty_events_by_steps() -> None:
    """By steps there are twenty prunings by default, by epochs one each; the last is never left out."""
    timing = Timing(unit="step")
    assert [timing.due(p, 0, (0, 40)) for p in (1, 2, 40)] == [False, True, True]
    assert [Timing(frequency=3).due(p, 3, (0, 5)) for p in (3, 4, 5, 6)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"cool_down": -1}, "`cool_down`"), ({"end": 1, "cool_down": 1}, "not both")]
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """Each is an error that names the argument."""
    with pytest.raises(MisconfigurationException, match=message):
        Timing(**arguments)
