"""Which numbers of a call the source itself fixes."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from engine.numbers.literals import unfixed_numbers
from engine.numbers.sizes import numbers_in
from engine.source.reassigned import Reassigned

LIMIT = 4.0
REASSIGNED = Reassigned(nn.Identity())


def call(*numbers: Any, **named: Any) -> list[Any]:
    """Return which numbers of this call its source does not fix."""
    return unfixed_numbers(numbers_in([*numbers, *named.values()]), sys._getframe(1), REASSIGNED)


class Layer:
    """Has attributes of a constructor, and one that its forward sets."""

    size = 3

    def __init__(self) -> None:
        self.slope, self.state = 0.2, 0.3

    def forward(self, number: float) -> list[Any]:
        """Pass numbers of all kinds."""
        self.state = number
        half = 0.5
        sometimes = 1.5
        if number:
            sometimes = 2.5
        settled = [call(1.0, -2), call(LIMIT * 2, self.slope), call(half, last=self.size)]
        return [settled, call(number), call(self.state), call(sometimes), call(float("2.0"), 3.0)]


def filled(wanted: float, padding: float = 0.5, first: bool = True) -> list[list[Any]]:
    """Pass arguments on, a choice by one, and a variable with a single assignment."""
    if wanted:
        dim = 7.0 if first else 8.0
    return [call(wanted), call(padding), call(dim)]


def wrapped(*numbers: float) -> list[list[Any]]:
    """Hand a sequence on."""
    return filled(*numbers)


def test_arguments_that_the_running_call_fixes() -> None:
    """Literals and defaults are fixed; what comes from a variable is not, nor what a sequence hands on."""
    number = float("9.0")
    assert filled(2.0) == [[], [], []] and filled(2.0, 3.0, first=False) == [[], [], []]
    assert filled(number, number) == [[9.0], [9.0], []]
    assert filled(number, first=bool(number)) == [[9.0], [], [7.0]]
    assert wrapped(2.0, 3.0) == [[2.0], [3.0], [7.0]]


def test_what_the_source_fixes() -> None:
    """Literals, globals, constructors' attributes and plain variables; no arguments, no calls, nothing conditional."""
    assert Layer().forward(9.0) == [[[], [], []], [9.0], [9.0], [2.5], [2.0]]


class Shapes:
    """Puts a shape together before it is passed."""

    def __init__(self) -> None:
        self.width = 8

    def forward(self, rows: tuple[int, ...], number: int) -> list[Any]:
        """Pass tuples of fixed numbers and others."""
        columns = number + 1
        shape = (*rows, -1, self.width)
        mixed = (number, columns, 3)
        twice = (1, 2)
        if number:
            twice = (3, 4)
        number = 5
        return [call(*shape), call(shape), call(mixed), call(twice), call(*twice)]


def test_a_tuple_that_is_put_together_before() -> None:
    """What the source fixes of its elements is fixed."""
    assert Shapes().forward((7,), 9) == [[7], [7], [9, 10], [3, 4], [3, 4]]


def handed(backend: type, sizes: tuple[int, ...]) -> list[list[Any]]:
    """Hand shapes on to a function that a variable stands for, as einops does."""
    shape = (*sizes, -1)
    return [backend.shaped((sizes[0], -1)), backend.shaped(shape), backend.shaped(sizes), backend.shaped([7, -1])]


class Handed:
    """A backend."""

    @staticmethod
    def shaped(shape: Any) -> list[Any]:
        """Pass a shape."""
        return call(shape)


def test_a_tuple_that_the_caller_puts_together() -> None:
    """What stands in it is fixed, at the first call too, and nothing that is picked from it."""
    assert handed(Handed, (7,)) == [[7], [7], [], []]


def of_sizes(x: Tensor, parts: list[Tensor], many: int) -> list[list[Any]]:
    """Pass numbers that follow from sizes, and some that follow from one and from something else."""
    side = int(math.sqrt(x.shape[1]))
    whole, rest = divmod(len(parts[0]), 2)
    shift = 0 if x.size(0) <= 8 else 4
    both = x.size(0) * many
    counted = len(parts)
    return [call(side), call(whole, rest), call(shift), call(both), call(counted)]


def test_numbers_of_sizes_are_floats() -> None:
    """They are amounts that other sizes tell apart, and factors that nothing does."""
    numbers = of_sizes(torch.zeros(3, 16), [torch.zeros(5)], int("2"))
    assert numbers == [[4.0], [2.0, 1.0], [0.0], [6], [1]]
    assert [type(number) for [number, *_] in numbers] == [float, float, float, int, int]


def test_numbers_of_another_kind() -> None:
    """False stands for no 0, and 1 for no 1.0."""
    zero, one = int("0"), float("1")
    assert [call(zero, False), call(one, 1), call(True, 1, one)] == [[0], [1.0], [1.0]]


def reshaped(x: Tensor, half: int) -> list[list[Any]]:
    """Compute numbers of sizes that are no more there when they are passed."""
    side, parts = int(x.shape[2] ** 0.5), [x]
    rows = int(len(parts[0]) ** 0.5)
    x = x.flatten()
    parts = []
    shift = 0 if str(half) <= "3" else 1
    return [call(side), call(rows), call(shift)]


def test_sizes_that_are_gone() -> None:
    """What cannot be computed again may be any number."""
    assert reshaped(torch.zeros(4, 2, 9), 3) == [[3], [2], [0]]


def defaults(x: Any, dim: int = 1, eps: float = 0.5) -> None:
    """Stands for a function of torch."""


def passed(dim: int) -> list[list[Any]]:
    """Leave arguments out, and pass one that has the value of its default."""

    def own(*numbers: Any, **named: Any) -> list[Any]:
        return unfixed_numbers([1, 0.5], sys._getframe(1), REASSIGNED, defaults)

    return [own(3.0), own(3.0, dim), own(3.0, dim=dim), own(*[3.0])]


def test_defaults_of_what_is_called() -> None:
    """They stand for the arguments that a call leaves out, and for no other."""
    assert passed(int("1")) == [[], [1], [1], [1, 0.5]]


def test_functions_of_fixed_numbers() -> None:
    """Those of `math` too, a sum's first number, and the length of a list of modules; over several lines as well."""
    layers = Layers()
    both = alike = 3.0
    assert [call(math.sqrt(2.0 / math.pi)), call(both, alike), layers.count()] == [[], [], []]
    assert layers.call(
        1.0,
    ).call(2.0) == []  # fmt: skip
    assert sum([Layers()]) == [] and sum([Layers()], int("0")) == [0]


class Layers(nn.Module):
    """Layers in a list, which can be counted and added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])

    def count(self) -> list[Any]:
        """Pass their number."""
        return call(len(self.layers))

    def call(self, number: float) -> Any:
        """Return itself first, then what is not fixed."""
        return self if number == 1.0 else unfixed_numbers([number], sys._getframe(1), REASSIGNED)

    def __radd__(self, other: int) -> Any:
        """Return what is not fixed of the number that it is added to."""
        return unfixed_numbers([other], sys._getframe(1), REASSIGNED)


def test_code_without_a_source() -> None:
    """Nothing is fixed where nothing can be looked up."""
    space: dict[str, Any] = {"call": call}
    exec("found = call(1.0)", space)
    assert space["found"] == [1.0]


def test_variables_that_follow_from_themselves() -> None:
    """They are fixed if what they begin with is, and are no endless question otherwise."""
    number = 1.5
    other = float("2.5")
    number = number + 1
    other = other + 1
    one, two = 1.25, 2.25
    one, two = two, one
    assert [call(number), call(other), call(one, two)] == [[], [3.5], []]


def test_a_tuple_that_is_repeated() -> None:
    """As many ones as there are dimensions."""
    x, three = torch.zeros(2, 3, 4), int("3")
    shape = (2,) + (1,) * (x.ndim - 1)
    other = (2,) + (three,) * (x.ndim - 1)
    assert [call(shape), call(other)] == [[], [3, 3]]
