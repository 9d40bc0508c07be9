"""Which node a call is."""

from __future__ import annotations

import dataclasses

from engine.verification.way import Way
from engine.verification.witness import Witness
from tests.engine.nets import analysis_of, dead, image, plain


def witness(decided: bool) -> Witness:
    """Of a convolution, a norm, a convolution and a linear layer."""
    model = plain()
    found = Witness.of(analysis_of(model, image(), dead(model, {"0": [0]}, bias=True)))
    return dataclasses.replace(found, decided=decided)


def taken(found: Witness, order: list[int]) -> tuple[list[int | None], set[int], bool]:
    """Positions as the nodes run in some order, which can be compared, and whether the way was another one."""
    way, nodes = Way(found), [found.nodes[n] for n in order]
    steps = [way.step(node.module if found.decided else "", node.op) for node in nodes]
    return steps, set(way.end()), way.diverged


def test_the_same_way() -> None:
    """The n-th call is the n-th node."""
    for decided in (False, True):
        found = witness(decided)
        order = list(range(len(found.nodes)))
        assert taken(found, order) == (order, set(order), False) and len(order) > 2


def test_another_order() -> None:
    """Modules are told apart where data decide; where they do not, a position means nothing."""
    found = witness(True)
    order = list(range(len(found.nodes)))[::-1]
    assert taken(found, order) == (order, set(order), True)
    steps, comparable, diverged = taken(witness(False), order)
    assert steps[0] is None and comparable == set() and diverged


def test_a_module_that_runs_twice_or_not_at_all() -> None:
    """It is left out: which of its calls is which cannot be told."""
    found = witness(True)
    order = list(range(len(found.nodes)))
    steps, comparable, diverged = taken(found, [*order, order[-1]])
    assert steps == [*order, None] and comparable == set(order[:-1]) and diverged
    assert taken(found, order[1:])[1:] == (set(order[1:]), True)
