"""The search for cycles is held back, and only for as long."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from torch import nn

import engine
from engine.program.garbage import uncollected
from tests.engine.nets import dead, image, plain


@pytest.fixture
def searched() -> Iterator[list[int]]:
    """The generation of every search while the test runs."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def test_no_search_while_a_network_is_analysed(searched: list[int]) -> None:
    """Not even with so low a threshold that anything else is interrupted by many."""
    thresholds = gc.get_threshold()
    model = nn.Sequential(plain(), *(nn.Identity() for _ in range(50)))
    masks = dead(model, {"0.0": [0, 2]}, bias=True)
    gc.set_threshold(10, 1, 1)
    try:
        kept = [[i] for i in range(100)]
        assert searched and kept
        searched.clear()
        graph = engine.trace(model, image())
        repaired = engine.fix_mask_conflict(masks, model, image(), graph=graph)
        during = len(searched)
        engine.ModelSpeedup(model, image(), repaired, graph=graph, confidence=0).speedup_model()
    finally:
        gc.set_threshold(*thresholds)
    assert during <= 8  # between the calls, and while arguments are checked


def test_it_is_as_it_was_after_an_error() -> None:
    """On again, or off where it was off."""
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(KeyError), uncollected():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_it_stays_off_until_the_last_thread_is_done() -> None:
    """A thread that ends first does not switch it on for the others."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with uncollected():
        leave.set()
        thread.join(10)
        assert not gc.isenabled()
    assert gc.isenabled()
