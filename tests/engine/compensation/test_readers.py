"""What a reader's output is added to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.compensation.readers import Sum, adds, is_affine, slope_of, sums
from engine.program.stored import stored_tensors


class _Block(nn.Module):
    """A sum behind a norm, and behind a function that no factor and shift describe."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 3, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm(self.layer(x))).relu()


@torch.no_grad()
def test_the_sum_behind_a_norm_and_its_factor() -> None:
    """Factor and shift of the norm, by channel; a sigmoid has none."""
    torch.manual_seed(0)
    for norm, affine in ((nn.BatchNorm2d(3), True), (nn.Sigmoid(), False)):
        net = _Block(norm).double().eval()
        if affine:
            nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        graph = engine.trace(net, torch.zeros(2, 3, 4, 4).double())
        layer = graph.nodes[0]
        [(chain, node, other)] = sums(layer, graph.users(), {v.index for v in graph.outputs})
        assert adds(node) and len(chain) == 1 and other is graph.inputs[0]
        assert is_affine(chain, layer.output, 1, stored_tensors(net)) is affine
        if affine:
            factor, shift = slope_of(Sum(chain, node, other, ()), layer.output, 1, stored_tensors(net))
            scale = (norm.running_var + norm.eps).rsqrt() * norm.weight
            assert torch.allclose(factor, scale) and torch.allclose(shift, norm.bias)


def test_a_difference_is_no_sum() -> None:
    """By trying, and not by the name of the op."""
    graph = engine.trace(_Subtracts(), torch.zeros(2, 3))
    assert [adds(node) for node in graph.nodes if len([v for v in node.inputs if not v.stored]) == 2] == [False]


class _Subtracts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.layer(x)
