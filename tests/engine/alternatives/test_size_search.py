"""Sizes at which a decision comes out otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.axes import Axis, axes_of
from engine.alternatives.size_search import changes, sizes_beyond, sizes_further, sizes_of
from engine.limits import LARGEST_SIZE
from engine.program.expressions import Apply, Guard, ShapeOf


def _guard(symbol: str, bound: int, outcome: bool, dim: int = 2) -> tuple[Guard, list[Axis]]:
    x = torch.zeros(2, 3, 8, 6)
    graph = engine.trace(nn.ReLU(), x)
    return Guard(Apply(symbol, ShapeOf(graph.inputs[0], dim), bound), outcome, "net.py:1"), axes_of((x,), {})


def _named(sizes: Mapping[Axis, int]) -> dict[int, int]:
    return {min(axis.places)[1]: size for axis, size in sizes.items()}


@pytest.mark.parametrize(
    ("symbol", "bound", "outcome", "change"),
    [("==", 12, False, 4), (">", 40, False, 33), ("<", 40, True, 32), ("!=", 8, False, -1), (">", 8, False, 1)],
)
def test_the_nearest_change(symbol: str, bound: int, outcome: bool, change: int) -> None:
    """The first size that is tried is one at which the decision comes out otherwise."""
    guard, _ = _guard(symbol, bound, outcome)
    [leaf] = sizes_of(guard)
    assert next(changes(guard, leaf, ())) == change


def test_one_axis_is_moved_from_where_the_decision_was_taken() -> None:
    """The height comes first, as a height is compared; what the run had already stays."""
    guard, axes = _guard("==", 12, False)
    batch = next(axis for axis in axes if axis.batch)
    tried = list(map(_named, sizes_beyond(guard, {batch: 3}, axes)))
    assert tried[0] == {0: 3, 2: 12}
    assert all(sizes.keys() >= {0} for sizes in tried)


def test_no_size_is_beyond_the_largest() -> None:
    """A number in the code asks for no run that fills the memory."""
    guard, axes = _guard(">", 3 * LARGEST_SIZE, False)
    assert not [s for s in sizes_beyond(guard, {}, axes) if max(s.values()) > LARGEST_SIZE]


def _twice(y: Tensor) -> bool:
    return y.shape[2] == 12 and y.shape[3] == 6


def _pooled(y: Tensor) -> bool:
    z = nn.functional.avg_pool2d(y, 2)
    return z.shape[2] == 6 and z.shape[3] == 3


def _in_a_batch(y: Tensor) -> bool:
    return _twice(y) and len(y) == 3


@pytest.mark.parametrize("decides", [_twice, _pooled, _in_a_batch])
def test_one_decision_leads_to_the_next(decides: Callable[[Tensor], bool]) -> None:
    """A branch that asks for several sizes at once is recorded, and its notes name no code that did not run."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            y = self.body(x)
            return y.sigmoid() if decides(y) else y.tanh()

    graph = engine.trace(Net(), torch.zeros(2, 3, 8, 8))
    assert {"sigmoid", "tanh"} <= {node.op.rpartition(".")[2] for node in graph.nodes}
    assert not graph.notes


def _further(guard: Guard, axes: list[Axis], *seen: int, numbers: Collection[int] = ()) -> list[dict[int, int]]:
    sizes = [(size,) for size in seen]
    return list(map(_named, sizes_further(guard, numbers or {int(guard.expr.right)}, sizes, {}, {}, axes)))  # type: ignore[arg-type]


def test_the_next_numbers_of_rounds() -> None:
    """They are the nearest ones in both directions that no run had."""
    guard, axes = _guard("==", 2, True)
    axes = [axis for axis in axes if min(axis.places)[1] == 2]
    rounds = replace(guard, expr=Apply("==", Apply("//", guard.expr.left, 3), 2))
    assert _further(rounds, axes) == [{2: 9}, {2: 5}]
    assert _further(rounds, axes, 9, 12, 5) == [{2: 15}, {2: 2}]


def test_the_next_numbers_behind_a_transposition() -> None:
    """Any axis may be the one that a size follows from; that of the same dimension is the first one."""
    guard, axes = _guard("==", 2, True, dim=1)
    rounds = replace(guard, expr=Apply("==", Apply("//", guard.expr.left, 3), 2))
    dims = [dim for sizes in _further(rounds, axes) for dim in sizes]
    assert set(dims) == {min(axis.places)[1] for axis in axes}


def test_the_next_number_of_thresholds() -> None:
    """A size that exceeds one number more, or one less, is another one."""
    guard, axes = _guard(">", 3, True)
    axes = [axis for axis in axes if min(axis.places)[1] == 2]
    assert _further(guard, axes, numbers={3, 6, 20}) == [{2: 21}, {2: 6}]
    assert _further(guard, axes, 24, 5, numbers={3, 6, 20}) == [{2: 3}]


def test_runs_that_compared_more_sizes_say_nothing_of_these() -> None:
    """One line of code may compare one size in a layer, and two in another."""
    guard, axes = _guard(">", 8, False)
    runs: list[tuple[int, ...]] = [(8,), (8, 6)]
    own, both = (list(map(_named, sizes_further(guard, {8}, seen, {}, {}, axes))) for seen in (runs[:1], runs))
    assert own == both and own


def test_sizes_of_another_run_are_as_many_as_it_compares() -> None:
    """A line that compares a smaller side may compare one size in one run, and two in another."""
    guard, axes = _guard(">", 3, True)
    axes = [axis for axis in axes if min(axis.places)[1] == 2]
    further = sizes_further(guard, {3, 6}, [(5, 9), (7,)], {}, {}, axes)
    assert list(map(_named, further)) == list(map(_named, sizes_further(guard, {3, 6}, [(7,)], {}, {}, axes)))


def test_levels_down_to_a_size() -> None:
    """The levels of a pyramid end where a side is small, whichever is the smaller one."""

    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
            self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, 2, 1) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            levels = [self.stem(x)]
            for layer in self.down:
                if min(levels[-1].shape[-2:]) < 3:
                    break
                levels.append(layer(levels[-1]))
            return [self.head(level) for level in levels]

    assert engine.trace(Levels(), torch.zeros(2, 3, 16, 16)).nodes
