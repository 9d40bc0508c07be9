"""Counts that note what they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_compress.trainer.watched_counts import WatchedCount

WAYS: dict[str, tuple[Callable[[Any], Any], set[int]]] = {
    "compared": (lambda n: n < 5, {5}),
    "compared the other way round": (lambda n: 5 <= n, {5}),
    "compared with a fraction": (lambda n: n > 2.5, {2, 3}),
    "the smaller one": (lambda n: min(n, 7), {7}),
    "one of several": (lambda n: n in (4, 6), {4, 6}),
    "the rest": (lambda n: (n + 1) % 4 == 0, {3}),
    "a part": (lambda n: min(n / 8, 1.0), {8}),
    "a difference": (lambda n: n - 3 >= 4, {7}),
    "a quotient": (lambda n: n // 10 == 2, {10, 20}),
    "no number": (lambda n: n == "last", set()),
    "nothing": (lambda n: n * 3, set()),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_noted(way: str) -> None:
    """What code makes of it is what it makes of the number."""
    code, expected = WAYS[way]
    noted: set[int] = set()
    assert code(WatchedCount(0, noted)) == code(0) and noted == expected


def test_it_is_a_number() -> None:
    """To torch, to containers, and once it is copied."""
    count = WatchedCount(3, set())
    assert (torch.ones(2) * count).tolist() == [3, 3] and torch.zeros(5)[count] == 0 and {3: 1}[count] == 1
    assert type(copy.deepcopy(count)) is int and len(range(count)) == 3
