"""What leaving code out does to variables."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.flow.branches import Branch
from engine.flow.effects import Effect
from engine.observations.dataflow import Dataflow
from engine.ops.calls import FUNCTIONS
from engine.unrecorded.skipped_code import are_aligned, effects_of_skipping, is_in_loop
from tests.engine.nets import Net


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = y * 2", {"y": Effect.KEEPS_ZERO}),
        ("y += 1", {"y": Effect.CHANGES}),
        ("y = f(y)", {"y": Effect.USES}),
        ("y = y.float()", {"y": Effect.KEEPS}),
        ("z = f(y)", {}),
        ("z = f(y)\n    y = y * z", {"y": Effect.KEEPS_ZERO}),
    ],
)
def test_variables_keep_what_they_held(body: str, expected: dict[str, Effect]) -> None:
    """Those that are set before; one that is set there alone is not read where it is left out."""
    tree: Any = ast.parse(f"def forward(x, y):\n  if x:\n    {body}\n  return y").body[0]
    condition = tree.body[0]
    branch = Branch([ast.Pass()], condition.test, frozenset({-1}), skipped=condition.body, entered=frozenset({2}))
    assert effects_of_skipping(branch, tree, FUNCTIONS) == expected


def test_in_a_loop_an_earlier_round_has_set_them() -> None:
    """So that they are read."""
    tree: Any = ast.parse("def forward(x):\n  for n in x:\n    if n:\n      z = f(n)\n    g(z)").body[0]
    condition = tree.body[0].body[0]
    branch = Branch([ast.Pass()], condition.test, frozenset({-1}), skipped=condition.body, entered=frozenset({2}))
    assert effects_of_skipping(branch, tree, FUNCTIONS) == {"z": Effect.USES}
    assert is_in_loop([condition], tree) and not is_in_loop([tree.body[0]], tree)


def test_a_residual_stream_is_aligned() -> None:
    """Through sums, activations and norms; not through a layer, unless another run computes it anew."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.stem(x)
        return m.head(m.norm(y + m.inner(y.relu())))

    net = Net(forward, stem=nn.Linear(3, 8), inner=nn.Linear(8, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 8))
    graph = engine.trace(net, torch.zeros(2, 3))
    dataflow = Dataflow(graph.nodes, graph.values, FUNCTIONS)
    stem, relu, inner, total, norm, head = (node.output for node in graph.nodes)
    assert are_aligned([norm, stem, total], dataflow) and are_aligned([stem, relu], dataflow)
    assert not are_aligned([stem, inner], dataflow) and not are_aligned([stem, norm, head], dataflow)


@pytest.mark.parametrize(("behind", "expected"), [("return y", {"y"}), ("return y, z", {"y", "z"})])
def test_a_break_leaves_what_is_read_behind_the_loop(behind: str, expected: set[str]) -> None:
    """No later round reads the rest."""
    text = (
        f"def forward(x, y):\n  z = y\n  for n in x:\n    z = f(z, n)\n    y = y + z\n    if n > y: break\n  {behind}"
    )
    tree: Any = ast.parse(text).body[0]
    loop = tree.body[1]
    condition = loop.body[-1]
    branch = Branch(condition.body, condition.test, frozenset({4}), skipped=loop.body)
    assert effects_of_skipping(branch, tree, FUNCTIONS).keys() == expected
