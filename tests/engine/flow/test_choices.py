"""What code chooses differently, in classes that are no modules."""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor, nn

from engine.flow.argument_flow import passed_arguments
from engine.flow.choices import Choices
from engine.source.function_text import syntax_of


class Output:
    """Holds features, and chooses nothing."""

    def __init__(self, features: Tensor) -> None:
        self.features = features


class Plan:
    """Holds a number that a size decides."""

    def __init__(self, size: int) -> None:
        self.parts = parts_of(size)


class Plans:
    """Holds such objects."""

    def __init__(self, size: int) -> None:
        self.all = [Plan(size) for _ in range(2)]


def parts_of(size: int) -> int:
    """Return a number that the size decides."""
    return 2 if size > 8 else 1


class Block(nn.Module):
    """Receives options."""

    def forward(self, x: Tensor, option: Any) -> Tensor:
        """Return features."""
        return x if option is None else -x


class Net(nn.Module):
    """Passes objects on."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.block = Block()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        parts_of(len(x))
        option = self.kind(x.relu())
        return self.block(x, option)


def _choices() -> Choices:
    tree = syntax_of(parts_of.__code__)
    assert tree is not None
    choice = next(n for n in ast.walk(tree) if isinstance(n, ast.IfExp))
    return Choices(
        [parts_of], sized={f"{__file__}:{parts_of.__code__.co_firstlineno + 2}"}, expressions=frozenset([choice.body])
    )


def test_classes_that_choose_nothing_pass_nothing_on() -> None:
    """An object that only holds features is no choice, whatever other functions choose."""
    assert not _choices().are_in_class(Output)
    assert passed_arguments(Net(Output), (), _choices()).by_code.get(Block.forward.__code__) is None


def test_choices_in_the_methods_of_classes_are_followed() -> None:
    """The class's own methods count, and the functions and classes that they mention."""
    for kind in (Plan, Plans):
        assert _choices().are_in_class(kind)
        assert passed_arguments(Net(kind), (), _choices()).by_code[Block.forward.__code__] == {"option"}


def test_each_kind_of_choice_counts() -> None:
    """By the place, by the expression, by the variable, and by the name of a function."""
    whole = _choices()
    for one in (
        Choices(sized=whole.sized),
        Choices(expressions=whole.expressions),
        Choices(variables={parts_of.__code__: {"size"}}),
        Choices([parts_of]),
    ):
        assert one.are_in_class(Plans) and not one.are_in_class(Output)
