"""What must hold between slots."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.analysis.constraints import Equal, Fewer, Grouped, Multiple, NonEmpty, closed

BITS = st.lists(st.booleans(), min_size=12, max_size=12)


def fixed_point(constraint: object, keep: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Ask until nothing is missing."""
    while len(missing := constraint.missing(keep, score)):
        assert not keep[missing].any()
        keep = keep.index_fill(0, missing, True)
    return keep


def test_a_layer_keeps_an_output() -> None:
    """The best one, where none is kept."""
    labels = torch.tensor([2, 5, 7])
    keep, score = torch.zeros(12, dtype=torch.bool), torch.arange(12.0)
    assert NonEmpty(labels).missing(keep, score).tolist() == [7]
    keep[2] = True
    assert NonEmpty(labels).missing(keep, score).tolist() == []


@given(BITS)
def test_pieces_of_a_chunk_keep_equally_many(bits: list[bool]) -> None:
    """After filling up all rows have as many as the fullest had, and at least one; nothing kept is lost."""
    keep = torch.tensor(bits)
    rows = torch.arange(12).view(3, 4)
    after = fixed_point(Equal(rows), keep, torch.arange(12.0))
    counts = after[rows].sum(1)
    assert counts.tolist() == [max(1, int(keep[rows].sum(1).max()))] * 3
    assert (after | ~keep).all()


def test_the_more_important_slot_is_kept() -> None:
    """Where there is a choice the score decides."""
    keep = torch.tensor([True, True, False, False])
    score = torch.tensor([0.0, 0.0, 1.0, 2.0])
    assert Equal(torch.tensor([[0, 1], [2, 3]])).missing(keep, score).tolist() == [3, 2]
    keep = torch.tensor([True, False, False, False])
    assert Equal(torch.tensor([[0, 1], [2, 3]])).missing(keep, score).tolist() == [3]


@given(BITS)
def test_groups_keep_equally_many_or_go(bits: list[bool]) -> None:
    """Two inputs and two outputs in each of three groups: each group has equal counts, or nothing at all."""
    keep = torch.tensor(bits)
    inputs, outputs = torch.arange(6).view(3, 2), torch.arange(6, 12).view(3, 2)
    after = fixed_point(Grouped(inputs, outputs, True), keep, torch.zeros(12))
    i, o = after[inputs].sum(1), after[outputs].sum(1)
    alive = (i > 0) | (o > 0)
    assert alive.any() and (after | ~keep).all()
    assert len(i[alive].unique()) == len(o[alive].unique()) == 1 and i[alive][0] > 0 and o[alive][0] > 0


@given(BITS)
def test_groups_that_may_not_go_all_stay(bits: list[bool]) -> None:
    """Without an attribute to change, or with fixed inputs, each group keeps as many outputs as the fullest."""
    keep = torch.tensor(bits)
    inputs, outputs = torch.arange(6).view(3, 2), torch.arange(6, 12).view(3, 2)
    for constraint in (Grouped(inputs, outputs, False), Grouped(None, outputs, True)):
        after = fixed_point(constraint, keep, torch.zeros(12))
        assert len(after[outputs].sum(1).unique()) == 1 and after[outputs].any(1).all()


def test_constraints_resolve_to_representatives() -> None:
    """Labels become roots; a layer's doubles count once."""
    roots = torch.tensor([0, 1, 1, 3])
    assert NonEmpty(torch.tensor([1, 2, 3])).resolve(roots).labels.tolist() == [1, 3]
    assert Equal(torch.tensor([[2], [3]])).resolve(roots).rows.tolist() == [[1], [3]]
    grouped = Grouped(None, torch.tensor([[2], [3]]), True).resolve(roots)
    assert grouped.inputs is None and grouped.outputs.tolist() == [[1], [3]]


def test_sites_tell_pieces_apart() -> None:
    """Each piece and each group is a site; a layer that only keeps something is none."""
    assert len(Equal(torch.zeros(3, 2, dtype=torch.long)).sites()) == 3
    two = torch.arange(4).view(2, 2)
    assert len(Grouped(two, two, True).sites()) == 4 and len(Grouped(None, two, True).sites()) == 2
    assert NonEmpty(two).sites() == []


def test_what_has_to_be_told_apart() -> None:
    """Groups keep equally many of several inputs; a single input goes with its whole group, if groups may go."""
    outputs = torch.arange(6, 12).view(3, 2)
    several, single = torch.arange(6).view(3, 2), torch.arange(3).view(3, 1)
    assert len(Grouped(several, outputs, removable=True).sites()) == 6
    assert len(Grouped(single, outputs, removable=True).sites()) == 3
    assert len(Grouped(single, outputs, removable=False).sites()) == 6
    assert len(Grouped(None, outputs, removable=False).sites()) == 3


def test_groups_whose_channels_are_tied_go_independently() -> None:
    """A group of one unit goes as a whole or not at all, whatever the others lose."""
    tied, free = torch.tensor([[0, 0], [1, 1], [2, 2]]), torch.arange(6, 12).view(3, 2)
    assert Grouped(tied, tied, removable=True).sites() == []
    assert len(Grouped(tied, free, removable=True).sites()) == 3
    assert len(Grouped(tied, tied, removable=False).sites()) == 6


def test_fewer_of_some_than_of_others() -> None:
    """Where as many are kept of the few, one more of the many stays, the one with the highest score."""
    constraint = Fewer(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7]))
    keep = torch.tensor([True, True, True, True, True, False, False, True])
    assert not constraint.holds(keep)
    score = torch.arange(8.0)
    assert constraint.missing(keep, score).tolist() == [6, 5]
    keep[[5, 6]] = True
    assert constraint.holds(keep) and constraint.missing(keep, score).numel() == 0
    assert constraint.resolve(torch.arange(8) * 2).many.tolist() == [8, 10, 12, 14]


def test_a_multiple_is_kept() -> None:
    """The best of what would go fill the last step up; channels may share a slot; nothing at all is not a multiple."""
    score = torch.tensor([0.0, 5, 1, 3, 2, 4, 0, 0, 0])
    multiple = Multiple(torch.arange(1, 9), 4)
    keep = torch.zeros(9, dtype=torch.bool)
    assert closed([multiple], keep.clone(), lambda: score).nonzero()[:, 0].tolist() == [1, 3, 4, 5]
    keep[[2, 6, 7, 8]] = True
    assert multiple.holds(keep) and closed([multiple], keep.clone(), lambda: score).equal(keep)
    keep[1] = True
    assert closed([multiple], keep.clone(), lambda: score)[1:].all()
    pairs = multiple.resolve(torch.tensor([0, 1, 1, 3, 3, 5, 5, 7, 7]))
    keep = torch.zeros(9, dtype=torch.bool)
    keep[3] = True
    assert int(closed([pairs], keep, lambda: score)[pairs.labels].sum()) % 4 == 0
