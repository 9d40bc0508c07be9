"""What counts as an entry, and which errors name what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.errors import InputError
from engine.program.entries import entries_of


def test_forms() -> None:
    """A callable, a tuple and an `Entry`, in a mapping or in a sequence, are the same."""
    several = [entries_of({"step": max}), entries_of([("unused", engine.Entry(max))[1]]), entries_of(((max, (1,)),))]
    assert [entry.name for [entry] in several] == ["step", "max", "max"]
    assert several[2][0].args == (1,) and entries_of(None) == ()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"step": 3}, "An entry is a callable"),
        ("step", "`entries` must be a mapping or a list"),
        ([max, max], "'max' is the name of two entries"),
        ({"train": max}, "'train' is the name of a run of forward"),
        ({"step": engine.Entry(max, "ab")}, "needs a callable, a tuple"),
    ],
)
def test_what_is_none(entries: Any, message: str) -> None:
    """An error before anything is recorded that says what is expected."""
    with pytest.raises(InputError, match=message):
        engine.trace(nn.Linear(2, 2), torch.zeros(1, 2), entries=entries)


def test_a_method_follows_the_class_of_its_module() -> None:
    """A bound method is looked up again: a compaction may have exchanged the class."""

    class Net(nn.Linear):
        def step(self) -> int:
            return 1

    class Other(Net):
        def step(self) -> int:
            return 2

    net = Net(1, 1)
    entry = engine.Entry(net.step)
    net.__class__ = Other
    assert entry.run((), {}) == 2
