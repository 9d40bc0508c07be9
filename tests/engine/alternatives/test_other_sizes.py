"""Tests of runs at sizes other than the example's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.alternatives.axes import Axis, axes_of
from engine.alternatives.other_sizes import OtherSizes, reads_sizes
from engine.program.expressions import Apply, Guard, ShapeOf
from engine.program.graph import Graph, Value


class _Through(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.stem(x))


def _graph(f: Callable[[Tensor], Tensor]) -> Graph:
    return engine.trace(_Through(f), torch.zeros(2, 3, 8, 8))


def test_nothing_is_run_again_without_need() -> None:
    """Code that reads no size does the same at all of them."""
    graph = _graph(lambda x: F.max_pool2d(x, 2).flatten(2))
    assert {node.path for node in graph.nodes} == {"eval"} and not graph.varying


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.relu() if x.shape[-1] > 8 else x,
        lambda x: x.relu() if x.shape[-1] % 2 else x,
        lambda x: x.relu() if x.shape[0] == 1 else x,
        lambda x: x.relu() if x.shape[-2] > x.shape[-1] else x,
        lambda x: x.relu() if x.shape[-1] < 8 else x,
    ],
)
def test_a_branch_of_another_size_is_recorded(f: Callable[[Tensor], Tensor]) -> None:
    """Larger, odd, batch 1, one side alone, smaller."""
    graph = _graph(f)
    assert [node.path for node in graph.nodes if node.op == "relu"] == ["other"]


def test_numbers_that_forget_vary() -> None:
    """``int`` drops what a size remembers; what the op is given differs from run to run."""
    graph = _graph(lambda x: F.pad(x, (0, int(x.shape[-1] / 4) * 4 - x.shape[-1] + 4)))
    [pad] = [node.index for node in graph.nodes if node.op == "pad" and node.path == "eval"]
    assert (pad, ("pad", 1)) in graph.varying or ("pad", 1) in graph.nodes[pad].sizes


def test_captured_constants_vary() -> None:
    """A tensor that is made of a size is another one at another size."""
    graph = _graph(lambda x: x / torch.tensor(float(x.shape[-1])))
    [divide] = [node for node in graph.nodes if node.op == "div" and node.path == "eval"]
    assert divide.inputs[1].index in graph.resized


def test_sizes_that_are_said_are_the_only_ones() -> None:
    """A model that is only given one size is not run at others."""
    model = _Through(lambda x: x.relu() if x.shape[-1] > 8 else x)
    graph = engine.trace(model, torch.zeros(2, 3, 8, 8), dynamic_dims=({0},))
    assert {node.path for node in graph.nodes} == {"eval"}


def test_decisions_come_out_both_ways_or_are_named() -> None:
    """What is never decided otherwise is left over."""
    x = Value(0, (2, 3, 8, 8), torch.float32)
    wide = Value(0, (2, 3, 8, 16), torch.float32)
    guards = [Guard(Apply(">", ShapeOf(value, 3), 100), False, "net.py:1") for value in (x, wide)]
    others = OtherSizes()
    others.start([], guards[:1])
    assert reads_sizes(guards) and not others.undecided()
    assert not others.add([], guards[1:])
    assert [str(guard) for guard in others.undecided()] == ["(shape[3] > 100) (net.py:1)"]
    tried: list[dict[int, int]] = []

    def accepts(sizes: object) -> bool:
        tried.append({min(axis.places)[1]: size for axis, size in sizes.items()})  # type: ignore[attr-defined]
        return True

    others.explore(axes_of((torch.zeros(2, 3, 8, 8),), {}), accepts, larger_pictures=False)
    assert {2: 16, 3: 16} in tried and {0: 1} in tried and {3: 5} in tried


def test_a_decision_by_the_batch_asks_for_no_other_pictures() -> None:
    """Sizes are tried along the axes that change what a decision is about."""
    others, tried = OtherSizes(), []

    def guards(batch: int, side: int) -> list[Guard]:
        size = Value(0, (batch, 3, side, side), torch.float32)
        return [Guard(Apply(">", ShapeOf(size, d), n), size.shape[d] > n, f"net.py:{d}") for d, n in ((0, 9), (2, 1))]

    def accepts(sizes: Mapping[Axis, int]) -> bool:
        shape = {dim: size for axis, size in sizes.items() for _, dim in axis.places}
        tried.append(shape)
        others.add([], guards(shape.get(0, 2), shape.get(2, 8)))
        return True

    others.start([], guards(2, 8))
    others.explore(axes_of((torch.zeros(2, 3, 8, 8),), {}), accepts, larger_pictures=False)
    assert [sizes for sizes in tried if 2 in sizes][-1] == {2: 1, 3: 1}
    assert {0: 1} in tried and tried[-1] == {0: 10}
    assert not others.undecided()


def test_each_side_is_tried_where_the_model_rejects_both() -> None:
    """And the next size where it rejects the first."""
    others, tried = OtherSizes(), []

    def accepts(sizes: Mapping[Axis, int]) -> bool:
        shape = {dim: size for axis, size in sizes.items() for _, dim in axis.places}
        tried.append(shape)
        return 2 not in shape and shape.get(0) != 1

    others.explore(axes_of((torch.zeros(2, 3, 8, 8),), {}), accepts, larger_pictures=False)
    assert {3: 16} in tried and {0: 4} in tried


def test_a_sparse_constant_may_differ_between_sizes() -> None:
    """It is compared entry by entry."""

    def mixed(x: Tensor) -> Tensor:
        y = torch.sparse.mm(torch.eye(x.size(1)).to_sparse(), x[0].flatten(1)).view_as(x[:1])
        return y if y.shape == x.shape else x + y

    engine.trace(_Through(mixed), torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize("new, last", [(False, 1024), (True, 1025)])
def test_a_size_is_tried_for_decisions_that_it_may_change(new: bool, last: int) -> None:
    """Not 1023, where it comes out as before; the next only where code ran that is to be seen at another size."""
    others, tried = OtherSizes(), []

    def guards(tokens: int) -> list[Guard]:
        size = Value(0, (2, tokens), torch.float32)
        count = Apply("*", 2, ShapeOf(size, 1))
        long = Guard(Apply(">=", ShapeOf(size, 1), 1024), tokens >= 1024, "net.py:1")
        return [long, Guard(Apply("==", count, 0), False, "net.py:2")]

    def accepts(sizes: Mapping[Axis, int]) -> bool:
        tried.extend(sizes.values())
        others.add([], guards(tried[-1]), kept=new and tried[-1] == 1024)
        return True

    others.start([], guards(16))
    others.explore(axes_of((torch.zeros(2, 16),), {}, ({1},)), accepts, larger_pictures=False)
    assert tried == [32, 10, 17, *range(1024, last + 1)]
