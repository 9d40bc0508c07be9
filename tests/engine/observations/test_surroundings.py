"""Values around a piece of code."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.surroundings import is_own_op, may_pick_arguments, use_values_around_code, values_around
from engine.ops.calls import FUNCTIONS
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of


class Block(nn.Module):
    """A layer whose second result nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(3, 4), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        self.aside(x)
        return self.layer(x).relu()  # type: ignore[no-any-return]


def test_what_a_module_reads_and_computes() -> None:
    """Results that nothing reads are among it: other code may."""
    net = nn.Sequential(nn.Linear(2, 3), Block(), nn.Linear(4, 6))
    graph = engine.trace(net, torch.zeros(1, 2))
    dataflow = Dataflow(graph.nodes, graph.values, FUNCTIONS)
    modules = dict(net.named_modules())
    around = {value.shape for value in values_around("1", modules, dataflow)}
    assert around == {(1, 3), (1, 4), (1, 5)}
    assumptions = Assumptions()
    use_values_around_code(Block.forward.__code__, modules, dataflow, assumptions, "is used")
    assert {value.shape for value, _ in assumptions.used.values()} == around
    assert [node.op for node in graph.nodes if is_own_op(modules, node)] == ["relu"]


class Stage(nn.Module):
    """A block between two layers that the model holds as well, so that both have its names."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        return self.last(self.first(x))  # type: ignore[no-any-return]


def test_shared_parts_count_under_their_first_names() -> None:
    """What passes from one shared part to the other is around the module."""
    first, last = nn.Linear(2, 3), nn.Linear(3, 4)
    net = nn.Sequential(first, nn.Linear(3, 3), last, nn.Linear(4, 2), Stage(first, last))
    graph = engine.trace(net, torch.zeros(1, 2))
    between = next(node.output for node in graph.nodes if node.callers == ("4", "0"))
    dataflow, modules = Dataflow(graph.nodes, graph.values, FUNCTIONS), dict(net.named_modules())
    assert between in list(values_around("4", modules, dataflow))


class Loop(nn.Module):
    """Layers in containers, which it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), nn.Linear(5, 6)])

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_passes_between_parts_of_a_container() -> None:
    """All that the code of a module handles is around it, and nothing that only its parts handle."""
    for net, name in ((Loop(), ""), (nn.Sequential(Loop()), "0")):
        graph = engine.trace(net, torch.zeros(1, 2))
        dataflow, modules = Dataflow(graph.nodes, graph.values, FUNCTIONS), dict(net.named_modules())
        shapes = {value.shape for value in values_around(name, modules, dataflow)}
        assert shapes == {(1, 2), (1, 3), (1, 5), (1, 6)}


def _picked(items: list[Tensor], k: int) -> Tensor:
    return items[k]


def _passed(items: list[Tensor], k: int) -> Tensor:
    return _picked(items, k + 1)


class Picking(nn.Module):
    """Computes features of which another function picks some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(2, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor, k: int = 0) -> Tensor:
        """Return features."""
        return _passed([self.head(self.layer(x))], k - 1)


def test_a_function_without_ops_runs_for_the_modules_of_its_callers() -> None:
    """By the names that these mention."""
    net = nn.Sequential(nn.Linear(2, 2), Picking())
    graph = engine.trace(net, torch.zeros(1, 2))
    dataflow, modules = Dataflow(graph.nodes, graph.values, FUNCTIONS), dict(net.named_modules())
    code, called = _picked.__code__, [f.__code__ for f in (Picking.forward, _passed, _picked)]
    for functions, shapes in ((called, {(1, 2), (1, 3), (1, 4)}), ([], set())):
        assumptions = Assumptions()
        use_values_around_code(code, modules, dataflow, assumptions, "is used", functions)
        assert {value.shape for value, _ in assumptions.used.values()} == shapes


class Picks(nn.Module):
    """Picks parts of its own, and what it receives."""

    def part(self, n: int) -> Any:
        """Return a part."""
        self.n = n
        parts = list(self.children())
        return parts[n]

    def filled(self, x: Tensor, n: int) -> Any:
        """Return an item of a list that a function fills."""
        items: list[Tensor] = []
        fill(items, x)
        return items[n]

    def looped(self, xs: list[Tensor], n: int) -> Any:
        """Return a slice of an item."""
        for x in xs:
            y = x
        return y[n]

    @staticmethod
    def item(xs: list[Tensor], n: int) -> Any:
        """Return an item."""
        return xs[n]


def fill(items: list[Tensor], x: Tensor) -> None:
    """Add features to a list."""
    items.append(x)


@pytest.mark.parametrize(
    "method, expected",
    [(Picks.part, False), (Picks.filled, True), (Picks.looped, True), (Picks.item, True)],
)
def test_picks_from_what_a_method_receives(method: Any, expected: bool) -> None:
    """Also through variables, and through lists that a function fills."""
    modules: dict[str, nn.Module] = {"": Picks()}
    tree = syntax_of(method.__code__)
    assert tree is not None
    picks = [n for n in nodes_of(tree, ast.Subscript) if isinstance(n.ctx, ast.Load) and ast.unparse(n.slice) == "n"]
    assert [may_pick_arguments(pick, method.__code__, modules) for pick in picks] == [expected]
