"""Tests of which dimensions of example inputs have other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import engine
from engine.alternatives.axes import axes_of, larger, odd, resized, smaller
from engine.errors import InputError

IMAGE = torch.zeros(2, 3, 8, 6)
TOKENS = torch.zeros(2, 7, dtype=torch.long)


def _places(*args: Any) -> list[list[tuple[int, int]]]:
    return [sorted(axis.places) for axis in axes_of(*args)]


def test_channels_of_pictures_are_none() -> None:
    """Batch, height and width of a picture; the second dimension is a size unless there are four."""
    assert _places((IMAGE,), {}) == [[(0, 0)], [(0, 2)], [(0, 3)]]
    assert _places((TOKENS,), {}) == [[(0, 0)], [(0, 1)]]


def test_equal_sizes_go_together() -> None:
    """A padding mask is as long as its tokens, and keyword arguments count on."""
    assert _places((TOKENS,), {"mask": TOKENS.bool()}) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_names_say_what_goes_together() -> None:
    """As `torch.export` has it: dimensions of one name are one size; a set names each by itself."""
    both = ({0: "batch", 1: "time"}, {0: "batch", 1: "other"})
    assert _places((TOKENS, TOKENS + 1), {}, both) == [[(0, 0), (1, 0)], [(0, 1)], [(1, 1)]]
    assert _places((IMAGE, TOKENS), {}, ({-1}, None)) == [[(0, 3)]]
    assert _places((), {"x": IMAGE}, {"x": {2}}) == [[(0, 2)]]
    assert _places(([IMAGE],), {}, ([{2}],)) == [[(0, 2)]]


@pytest.mark.parametrize("said", [({4},), "x", (None, None, {0}), ([{0}],), ({"a"},)])
def test_what_does_not_fit_is_refused(said: Any) -> None:
    """A dimension that is not there, more entries than arguments, or no set at all."""
    with pytest.raises(InputError, match="dynamic_dims"):
        axes_of((IMAGE,), {}, said)
    with pytest.raises(InputError, match="dynamic_dims"):
        engine.trace(torch.nn.Conv2d(3, 2, 1), IMAGE, dynamic_dims=said)


def test_resized_repeats_the_example() -> None:
    """Entries are those of the example, so that numbers of tokens stay in their table."""
    axes = axes_of((IMAGE,), {"tokens": TOKENS})
    sizes = {axis: axis.size + 3 for axis in axes}
    (image,), kwargs = resized((IMAGE,), {"tokens": TOKENS}, sizes)
    assert image.shape == (5, 3, 11, 9)
    assert kwargs["tokens"].shape == (5, 10) and kwargs["tokens"].dtype == torch.long


def test_sizes_to_try() -> None:
    """Larger, a bit larger and odd, smaller and no half."""
    assert [(larger(n), odd(n), smaller(n)) for n in (1, 8, 224)] == [(2, 2, 1), (16, 9, 5), (256, 225, 140)]
