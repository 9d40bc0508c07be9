"""The union-find of slots."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.analysis.slots import FROZEN, Slots


def test_new_slots_are_apart_and_free() -> None:
    """Fresh numbers, none of which is the frozen one; more than fit at first."""
    slots = Slots()
    made = torch.cat([slots.new(700), slots.new(700)])
    assert len(made.unique()) == 1400 and FROZEN not in made
    assert torch.equal(slots.find(made), made) and not slots.frozen(made).any()
    assert len(slots) == 1401


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=25))
def test_unions_are_transitive(pairs: list[tuple[int, int]]) -> None:
    """One vectorised union does what a set-based one does pair by pair."""
    slots = Slots()
    made = slots.new(12)
    classes = [{n} for n in range(12)]
    for a, b in pairs:
        merged = classes[a] | classes[b]
        for n in merged:
            classes[n] = merged
    if pairs:
        slots.union(made[[a for a, _ in pairs]], made[[b for _, b in pairs]])
    root = slots.find(made)
    for a in range(12):
        for b in range(12):
            assert (root[a] == root[b]) == (b in classes[a])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12), st.sets(st.integers(0, 7)))
def test_a_class_is_frozen_where_any_member_is(pairs: list[tuple[int, int]], frozen: set[int]) -> None:
    """Whatever comes first, the freezing or the union."""
    early, late = Slots(), Slots()
    a, b = early.new(8), late.new(8)
    for n in frozen:
        early.freeze(a[n : n + 1], f"reason {n}")
    for x, y in pairs:
        early.union(a[x], a[y])
        late.union(b[x], b[y])
    for n in frozen:
        late.freeze(b[n : n + 1], f"reason {n}")
    assert torch.equal(early.frozen(a), late.frozen(b))
    root = late.find(b)
    assert late.frozen(b).tolist() == [bool(set((root == root[n]).nonzero()[:, 0].tolist()) & frozen) for n in range(8)]


def test_a_tie_to_slot_zero_freezes() -> None:
    """A dimension of fixed size freezes what it meets, and does not tie those among each other."""
    slots = Slots()
    made = slots.new(3)
    slots.union(made, torch.tensor([FROZEN, 0, made[2]]))
    assert slots.frozen(made).tolist() == [True, True, False]
    assert len(slots.find(made).unique()) == 3
    assert slots.why(made) is not None and slots.why(made[2:]) is None


def test_the_first_reason_stays() -> None:
    """A frozen class keeps its reason; a reason beats the anonymous tie to slot 0."""
    slots = Slots()
    made = slots.new(2)
    slots.freeze(made[:1], "first")
    slots.freeze(made[:1], "second")
    assert slots.why(made[:1]) == "first"
    slots.union(made[1:], torch.zeros(1, dtype=torch.long))
    assert slots.why(made.flip(0)) == "first"


def test_unions_broadcast() -> None:
    """A column tied to one slot."""
    slots = Slots()
    grid = slots.new(6).view(2, 3)
    slots.union(grid, grid[:1])
    root = slots.find(grid)
    assert torch.equal(root[0], root[1]) and len(root.unique()) == 3
    assert torch.equal(slots.roots()[grid], root)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12), st.sets(st.integers(0, 7)))
def test_a_class_is_marked_where_any_member_is(pairs: list[tuple[int, int]], marked: set[int]) -> None:
    """Whatever comes first, the mark or the union; it survives the growth of the set."""
    early, late = Slots(), Slots()
    a, b = early.new(8), late.new(8)
    for n in marked:
        early.mark(a[n : n + 1])
    early.new(2000)
    for x, y in pairs:
        early.union(a[x], a[y])
        late.union(b[x], b[y])
    for n in marked:
        late.mark(b[n : n + 1])
    assert torch.equal(early.marked(a), late.marked(b))
    root = late.find(b)
    assert late.marked(b).tolist() == [bool(set((root == root[n]).nonzero()[:, 0].tolist()) & marked) for n in range(8)]
