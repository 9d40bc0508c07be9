"""Tensors in nested containers are found in order, and replaced in place of each other."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.program.trees import list_tensors, map_tensors, results_in, tensors_in

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


@dataclass
class _Guarded:
    """Numbers of which one differs by layer, as in configurations of transformers."""

    size: int
    per_layer: int
    scores: Tensor
    missing: int = field(init=False)

    def __getattribute__(self, name: str) -> Any:
        if name == "per_layer":
            raise RuntimeError("it differs by layer")
        return super().__getattribute__(name)


def test_a_list_holds_what_the_iterator_yields() -> None:
    """In the same order, whatever the containers are."""
    x, y, z = torch.zeros(1), torch.ones(1), nn.Parameter(torch.zeros(2))
    for tree in ((x, [y, None, 3], {"a": z}), x, None, [], ({"b": (x,)}, Pair(y, 2)), Output(x, {"c": y})):
        assert [id(t) for t in list_tensors(tree)] == [id(t) for t in tensors_in(tree)]


def test_fields_are_taken_as_they_are_stored() -> None:
    """Reading one may run code that raises, and one may have no value yet."""
    assert list(tensors_in([_Guarded(1, 2, ONE)])) == [ONE]


def test_tensors_are_replaced() -> None:
    """Containers keep their kind, and what is not a tensor stays the same object."""
    marker = object()
    found = map_tensors({"a": [ONE, marker], "b": Pair(TWO, (THREE,))}, lambda t: t * 10)
    assert found["a"][1] is marker and isinstance(found["b"], Pair) and isinstance(found["b"].right, tuple)
    assert [float(t) for t in tensors_in(found)] == [10, 20, 30]


class _Slotted:
    """An object without a dictionary."""

    __slots__ = ("_Slotted__own", "value")

    def __init__(self, value: Any) -> None:
        self.value = self.__own = value


def test_results_lie_in_objects() -> None:
    """Attributes, slots and fields are looked at, each object once, and cycles end."""
    x, cycle = torch.ones(2), SimpleNamespace(items=[1.5])
    cycle.self = cycle
    assert [t.tolist() for t in results_in([_Slotted(x), cycle, nn.Linear(1, 1), int])] == [[1, 1], [1, 1], 1.5]


def test_a_long_chain_of_objects() -> None:
    """However deep, no recursion."""
    chain: Any = torch.ones(1)
    for _ in range(5000):
        chain = SimpleNamespace(next=chain)
    assert len(list(results_in(chain))) == 1
