"""Tensors in nested containers are found in order, and replaced in place of each other."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.program.trees import map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")
ONE, TWO, THREE = (torch.full((1,), float(n)) for n in (1, 2, 3))


@dataclass
class Output:
    """A model's output as a dataclass."""

    scores: Tensor
    more: dict[str, Tensor]


def test_tensors_are_found_in_order() -> None:
    """In lists, tuples, mappings, named tuples and dataclasses; other things are passed over."""
    tree = [ONE, {"a": (TWO, 3, "text")}, Output(THREE, {"b": ONE}), Pair(TWO, None)]
    assert [float(t) for t in tensors_in(tree)] == [1, 2, 3, 1, 2]
    assert list(tensors_in(Output)) == [] and list(tensors_in(None)) == []


def test_tensors_are_replaced() -> None:
    """Containers keep their kind, and what is no tensor stays the same object."""
    marker = object()
    found = map_tensors({"a": [ONE, marker], "b": Pair(TWO, (THREE,))}, lambda t: t * 10)
    assert found["a"][1] is marker and isinstance(found["b"], Pair) and isinstance(found["b"].right, tuple)
    assert [float(t) for t in tensors_in(found)] == [10, 20, 30]
