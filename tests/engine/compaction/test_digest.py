"""The number that says whether content is the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from engine.compaction.digest import digest

CONTENT: dict[str, Any] = {
    "a": torch.arange(6.0).view(2, 3),
    "b": [1, "1", 1.0, None, True, b"1", torch.float16],
    "c": {"x": (torch.tensor(3, dtype=torch.bfloat16), set("ab"))},
}


def test_the_same_content_has_the_same_digest() -> None:
    """Order of keys, kind of mapping, memory layout and identity of objects do not count."""
    layout = torch.empty(3, 2).t()
    layout.copy_(CONTENT["a"])
    other = OrderedDict(c={"x": [torch.tensor(3, dtype=torch.bfloat16), set("ba")]}, b=list(CONTENT["b"]), a=layout)
    assert digest(other) == digest(CONTENT)


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.arange(6.0)},
        {"a": torch.arange(6.0).view(2, 3).double()},
        {"a": torch.nextafter(CONTENT["a"], torch.tensor(9.0))},
        {"b": [*CONTENT["b"][:-1], torch.float32]},
        {"b": ["1", 1, 1.0, None, True, b"1", torch.float16]},
        {"b": [1, "1", 1.0, None, 1, b"1", torch.float16]},
        {"c": {"y": CONTENT["c"]["x"]}},
        {"d": None},
    ],
)
def test_other_content_has_another_digest(change: dict[str, Any]) -> None:
    """One bit of a tensor, its shape, its dtype, a type or a key: each counts."""
    assert digest({**CONTENT, **change}) != digest(CONTENT)


def test_a_small_object_that_stands_for_a_huge_tree() -> None:
    """A container is looked at once: sixty levels of pairs of the level below take no time."""
    tree: Any = [1]
    for _ in range(60):
        tree = [tree, tree]
    assert len(digest(tree)) == 64


def test_a_tensor_that_repeats() -> None:
    """Ten billion times the same number take no time; entries that overlap otherwise are refused."""
    assert digest(torch.ones(1).expand(10_000_000_000)) != digest(torch.zeros(1).expand(10_000_000_000))
    assert digest(torch.ones(1).as_strided((1,), (10**10,))) == digest(torch.ones(1))
    with pytest.raises(ValueError, match="holds fewer"):
        digest(torch.ones(9).as_strided((5, 5), (1, 1)))
