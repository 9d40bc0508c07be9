"""Keys of the tables in which sizes are looked up."""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import FrameType, MappingProxyType
from typing import Any

from engine.numbers.table_keys import Lookups

IN_A_TABLE = {3: {4: "small"}, "name": 5, (True, 2): 6}


class _Layer:
    kernels = {(7, 9): "fast"}

    def frame(self) -> FrameType:
        """Return the frame of code that names its tables."""
        assert self.kernels
        return sys._getframe()


def _looked_up(*sizes: int, **tables: Any) -> list[set[tuple[int, int]]]:
    """Return what decides about each of some sizes that are hashed on one line."""
    lookups = Lookups()
    frame = sys._getframe()
    return [lookups.keys(frame, size, tables) for size in sizes]


def test_a_further_size_matters_where_those_before_it_agree() -> None:
    """So that one run leads to the next, as with two comparisons of which the second is made in time alone."""
    table = {(12, 6): "small", (8, 24): "wide"}
    assert _looked_up(9, 9, table=table) == [{(12, 0), (6, 0), (8, 0), (24, 0)}, {(12, 0), (8, 0)}]
    assert _looked_up(12, 9, table=table)[1] == {(12, 0), (8, 0), (6, 1)}


def test_a_run_depends_on_no_run_before_it() -> None:
    """What an earlier one has hashed on the same line is no part of a key."""
    lookups, table, frame = Lookups(), {(8, 12, 6): "small"}, sys._getframe()
    runs = []
    for _ in range(2):
        lookups.restart()
        runs.append(lookups.keys(frame, 12, {"table": table}))
    assert runs[0] == runs[1] >= {(8, 0), (12, 0), (6, 0)}


def test_tables_in_tables() -> None:
    """The keys of the inner one stand behind the key that leads to it; text and flags are no sizes."""
    assert _looked_up(9, 9, table=IN_A_TABLE)[1] == {(3, 0)}
    assert _looked_up(3, 9, table=IN_A_TABLE)[1] == {(3, 0), (4, 1)}
    assert _looked_up(3, 9, tables={"small": {(3, 4): None}})[1] == {(3, 0), (4, 1)}


def test_tables_of_every_kind() -> None:
    """Dictionaries of subclasses, read-only ones, and sets."""
    tables = [OrderedDict({(3, 4): 1}), MappingProxyType({(3, 4): 1}), {(3, 4)}, frozenset({(3, 4)})]
    assert all(_looked_up(3, 9, table=table)[1] == {(3, 0), (4, 1)} for table in tables)


def test_large_tables_are_caches() -> None:
    """Their keys are not compared."""
    assert _looked_up(9, table=dict.fromkeys(range(1000))) == [set()]


def test_tables_of_a_class_and_constants_of_code() -> None:
    """Attributes that the code names, and displays, whose keys are constants."""

    def display() -> FrameType:
        assert (11, 13) in {(11, 13): None}
        return sys._getframe()

    assert Lookups().keys(_Layer().frame(), 7) == {(7, 0), (9, 0)}
    assert {(11, 0), (13, 0)} <= Lookups().keys(display(), 7)
