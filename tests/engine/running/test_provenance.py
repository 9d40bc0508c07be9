"""What recording knows of the numbers that the code passes, and of what it decides by them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import engine
from engine.numbers.sizes import RECORDINGS
from engine.program.expressions import describe, evaluate
from tests.engine.nets import Net


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda m, x: x.view(x.shape[0], -1), ["shape[0]", "-1"]),
        (lambda m, x: x.view(x.size(0), x.size(1) * 16), ["shape[0]", "(shape[1] * 16)"]),
        (lambda m, x: x.view(-1, m.conv.out_channels, 16), ["-1", "conv.out_channels", "16"]),
        (lambda m, x: x.reshape(2, 128), ["2", "128"]),
        (lambda m, x: x.view(x.size()[:2] + (16,)), ["shape[0]", "shape[1]", "16"]),
        (lambda m, x: x.view(2, x[0].numel()), ["2", "(((1 * shape[0]) * shape[1]) * shape[2])"]),
    ],
)
def test_sizes_of_a_recorded_view(view: object, expected: list[str]) -> None:
    """Each integer argument has the expression that the code passed."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return view(m, m.conv(x))

    graph = engine.trace(Net(forward, conv=nn.Conv2d(3, 8, 1)), torch.zeros(2, 3, 4, 4))
    node = next(n for n in graph.nodes if n.op in ("view", "reshape"))
    name = "size" if node.op == "view" else "shape"
    found = [describe(node.sizes.get((name, k), given)) for k, given in enumerate(node.args[name])]
    assert found == expected and "test_provenance.py:" in node.location


def test_two_equal_numbers_keep_their_own_expressions() -> None:
    """A literal 8 beside a shape of 8 stays a literal: matched in order, not by value alone."""
    graph = engine.trace(
        Net(lambda m, x: m.conv(x).view(8, x.shape[0], -1), conv=nn.Conv2d(3, 8, 1)), torch.zeros(8, 3, 2, 2)
    )
    node = next(n for n in graph.nodes if n.op == "view")
    assert ("size", 0) not in node.sizes and describe(node.sizes["size", 1]) == "shape[0]"


def test_a_root_knows_its_expression_while_recording() -> None:
    """`math.sqrt` of a size is traced back to the shape, and is itself again afterwards."""
    plain = math.sqrt

    def forward(m: Net, x: Tensor) -> Tensor:
        root = math.sqrt(m.conv(x).shape[1])
        assert root == 2.0 and describe(root.expr) == "sqrt(shape[1])"
        assert evaluate(root.expr, lambda v: (1, 9), lambda e: 0) == 3.0
        return x

    engine.trace(Net(forward, conv=nn.Conv2d(3, 4, 1)), torch.zeros(1, 3, 2, 2))
    assert math.sqrt is plain


def test_the_side_of_a_number() -> None:
    """A number on the left of an operator with a tensor is known from one on its right, each time."""
    sides = []

    def forward(m: Net, x: Tensor) -> Tensor:
        n = x.shape[1]
        for y in (n * x, x * n, n / x, x / n):
            sides.append(y)
        return sum(sides[1:], sides[0])

    nodes = [n for n in engine.trace(Net(forward), torch.ones(1, 3, 2, 2)).nodes if n.op in ("mul", "div")]
    assert [n.site.reflected for n in nodes] == [True, False, True, False]


def test_comparisons_are_kept_as_guards() -> None:
    """Those of the user's code, each once, with its line; not those that torch makes."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.conv(x)
        for _ in range(3):
            y = y if y.shape[1] >= 8 and y.shape[2] else -y
        return m.norm(y)

    graph = engine.trace(Net(forward, conv=nn.Conv2d(3, 8, 1), norm=nn.BatchNorm2d(8)), torch.zeros(2, 3, 4, 4))
    assert [(describe(g.expr), g.outcome) for g in graph.guards] == [
        ("(shape[1] >= 8)", True),
        ("(shape[2] != 0)", True),
    ]
    assert all("test_provenance.py:" in str(guard) for guard in graph.guards)
    assert [g.outcome for g in graph.guards] == [evaluate(g.expr, lambda v: v.shape, lambda e: 0) for g in graph.guards]


CONDITIONS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a part": (lambda x: x.shape[1] / 2 > 3.5, "((shape[1] / 2) > 3.5)"),
    "bool": (lambda x: bool(x.shape[1] * 0.5), "((shape[1] * 0.5) != 0)"),
    "bits": (lambda x: x.shape[1] & 7, "(shape[1] == 8)"),
    "ceil": (lambda x: math.ceil(x.shape[1] / 3) == 3, "(ceil((shape[1] / 3)) == 3)"),
    "divmod": (lambda x: divmod(x.shape[1], 3), "(shape[1] == 8)"),
    "divided by": (lambda x: divmod(20, x.shape[1]), "(shape[1] == 8)"),
    "float": (lambda x: float(x.shape[1]), "(shape[1] == 8)"),
    "in": (lambda x: x.shape[1] in (8, 9), "(shape[1] == 8)"),
    "int": (lambda x: int(x.shape[1] / 2), "((shape[1] / 2) == 4.0)"),
    "largest": (lambda x: max(x.shape[1], 7), "(shape[1] < 7)"),
    "length": (lambda x: len(x[0]), "(shape[0] == 8)"),
    "logarithm": (lambda x: math.log2(x.shape[1]) > 2, "(log2(shape[1]) > 2)"),
    "logarithm to a base": (lambda x: math.log(x.shape[1], 2), "(shape[1] == 8)"),
    "loop": (lambda x: range(1, x.shape[1]), "(shape[1] == 8)"),
    "negative": (lambda x: -x.shape[1] < 0, "(neg(shape[1]) < 0)"),
    "round": (lambda x: round(x.shape[1] / 3) == 3, "(round((shape[1] / 3)) == 3)"),
    "round to digits": (lambda x: round(x.shape[1] / 5, 1), "((shape[1] / 5) == 1.6)"),
    "shape": (lambda x: x.shape[:2] == (2, 8), "(shape[0] == 2)"),
    "table": (lambda x: {6: 1}.get(x.shape[1]), "(shape[1] == 8)"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_the_code_decides_by_is_kept(name: str) -> None:
    """A comparison, or a number in a form that does not remember where it is from, is a guard."""
    look, expected = CONDITIONS[name]

    def forward(m: Net, x: Tensor) -> Tensor:
        look(x)
        return x

    graph = engine.trace(Net(forward), torch.zeros(2, 8, 4, 4))
    assert describe(graph.guards[0].expr) == expected
    assert all(evaluate(g.expr, lambda v: v.shape, lambda e: 0) is g.outcome for g in graph.guards)
    assert all("test_provenance.py:" in str(guard) for guard in graph.guards)


def test_what_decides_nothing_is_not_kept() -> None:
    """What torch does with its sizes, arithmetic, and text for the reader."""

    def forward(m: Net, x: Tensor) -> Tensor:
        n = -(-x.shape[1] // 3) + math.floor(x.shape[2] / 2) + round(x.shape[1] / 4)
        assert f"{x.shape}"
        return F.interpolate(F.pixel_shuffle(x, 2), scale_factor=2.0).view(x.shape[0], -1)[:, :n]

    assert engine.trace(Net(forward), torch.zeros(2, 8, 4, 4)).guards == ()


def test_everything_is_itself_again() -> None:
    """`range` and the functions of `math` that are replaced while recording, after an error too."""
    plain = builtins.range, math.exp, math.log, math.log10, math.log2, math.sqrt

    def forward(m: Net, x: Tensor) -> Tensor:
        assert builtins.range is not plain[0] and isinstance(plain[0](3), range) and list(range(1, 7, 2)) == [1, 3, 5]
        assert math.log(8, 2) == 3 and math.sqrt(4.0) == 2 and math.exp(0) == 1
        raise ValueError("no")

    with pytest.raises(engine.errors.TraceError, match="no"):
        engine.trace(Net(forward), torch.zeros(2, 8, 4, 4))
    assert (builtins.range, math.exp, math.log, math.log10, math.log2, math.sqrt) == plain and RECORDINGS == []


class _Counting(TorchFunctionMode):
    """Counts calls, as profilers do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_numbers_come_from_behind_a_mode() -> None:
    """What a mode of the user's passes on stands in the code that it is entered in."""

    def forward(m: Net, x: Tensor) -> Tensor:
        with _Counting():
            one, other = m.conv(x).chunk(2, 1)
            return one * other * m.scale

    graph = engine.trace(Net(forward, conv=nn.Conv2d(3, 8, 1), scale=2.5), torch.zeros(2, 3, 4, 4))
    assert not graph.uncertain
    assert "__torch_function__" not in {node.site.code.co_name for node in graph.nodes if node.site is not None}
