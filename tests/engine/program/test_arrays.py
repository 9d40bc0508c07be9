"""Compact arrays."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.program.arrays import align, along, compact, reduce_to, support, view_array

NAN = float("nan")


def test_support_lists_the_dimensions_that_matter() -> None:
    """Those that are larger than 1."""
    assert support(torch.zeros(1, 3, 1, 2)) == (1, 3)
    assert support(torch.zeros(())) == ()


def test_compact_shrinks_what_is_repeated_and_nothing_else() -> None:
    """Expanding the result gives the array back; NaN equals NaN."""
    array = torch.tensor([[1.0, NAN], [1.0, NAN]])
    small = compact(array)
    assert small.shape == (1, 2)
    assert torch.equal(small.expand(2, 2).nan_to_num(7), array.nan_to_num(7))
    assert compact(torch.tensor([[1.0, 2.0], [1.0, NAN]])).shape == (2, 2)
    assert compact(torch.full((3, 4), 2)).shape == (1, 1)


def test_compact_of_what_is_empty() -> None:
    """All entries are the same where there are none."""
    assert compact(torch.zeros(1, 0, 8)).shape == (1, 0, 1)


def test_an_empty_dimension_has_no_entry_that_is_true() -> None:
    """Reduced to a single entry, it is False."""
    assert reduce_to(torch.ones(1, 0, dtype=torch.bool), [1, 1]).tolist() == [[False]]


def test_align_prepends_dimensions() -> None:
    """As broadcasting does."""
    assert align(torch.zeros(3, 1), 4).shape == (1, 1, 3, 1)


def test_along_is_nan_where_entries_differ() -> None:
    """One number per index, from whatever is uniform over the other dimensions."""
    array = torch.tensor([[1.0, 2.0, NAN], [1.0, 3.0, NAN]])
    found = along(array, 1, 3)
    assert found[0] == 1 and found[1:].isnan().all()
    assert along(torch.tensor([[5.0]]), 0, 3).tolist() == [5, 5, 5]
    assert along(torch.tensor([[1.0], [2.0]]), 1, 4).isnan().all()


def test_reduce_to_ors_what_is_dropped() -> None:
    """Entries that broadcasting would merge are joined by OR."""
    used = torch.zeros(2, 3, 4, dtype=torch.bool)
    used[1, 2, 3] = True
    assert reduce_to(used, (3, 1)).tolist() == [[False], [False], [True]]
    assert reduce_to(used, (1, 1, 4)).flatten().tolist() == [False, False, False, True]


SHAPES = [
    ((6,), (2, 3)),
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 12)),
    ((4, 6), (2, 2, 3, 2)),
    ((4, 6), (8, 3)),
    ((2, 1, 6), (2, 3, 2, 1)),
    ((1, 2, 3), (3, 2)),
    ((2, 3, 1), (1, 2, 3)),
    ((1,), ()),
    ((2, 2, 2, 3), (4, 6)),
]


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_a_view_of_a_compact_array_is_the_view_of_the_tensor(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """For any set of dimensions that the array depends on."""
    for dims in itertools.chain.from_iterable(itertools.combinations(range(len(old)), n) for n in range(len(old) + 1)):
        shape = [n if d in dims else 1 for d, n in enumerate(old)]
        array = torch.randn(shape)
        found = view_array(array, old, new)
        assert torch.equal(found.expand(new), array.expand(old).reshape(new))


def test_a_view_of_what_is_empty() -> None:
    """It says nothing of any dimension."""
    assert view_array(torch.arange(8).view(1, 1, 8), (2, 0, 8), (2, 0, 2, 4)).shape == (1, 1, 1, 1)


def test_a_view_leaves_other_dimensions_compact() -> None:
    """Dimensions that are not regrouped with the array's own stay of size 1."""
    assert view_array(torch.zeros(1, 8, 1, 1), (5, 8, 3, 3), (5, 8, 9)).shape == (1, 8, 1)
    assert view_array(torch.zeros(1, 8, 1, 1), (5, 8, 3, 3), (5, 2, 4, 3, 3)).shape == (1, 2, 4, 1, 1)
