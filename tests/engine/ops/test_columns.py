"""What a contraction multiplies its weight with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.ops.columns import columns, has_columns
from engine.program.stored import stored_tensors

LAYERS = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "padded and strided": (nn.Conv2d(6, 4, 3, stride=2, padding=1), (6, 7, 7)),
    "dilated and grouped": (nn.Conv2d(6, 4, 3, dilation=2, groups=2), (6, 7, 7)),
    "depthwise": (nn.Conv2d(6, 12, 3, groups=6), (6, 7, 7)),
    "one dimension": (nn.Conv1d(6, 4, 3), (6, 7)),
    "three dimensions": (nn.Conv3d(6, 4, 2), (6, 3, 3, 3)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1), (6, 4, 4)),
    "transposed and grouped": (nn.ConvTranspose2d(6, 4, 3, groups=2), (6, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_weight_is_what_the_layer_computes(name: str) -> None:
    """In the order of `Contraction.canonical`, whatever the stride, padding, dilation and groups."""
    layer, shape = LAYERS[name]
    layer = layer.double()
    x = torch.randn(2, *shape, dtype=torch.float64)
    graph = engine.trace(layer, x)
    [node] = graph.nodes
    c = engine.RULES.contraction(node)
    assert has_columns(node, c)
    tensors = {"input": x, **stored_tensors(layer)}
    rows = columns(node, c, {key: tensors.get(key, argument) for key, argument in node.args.items()})
    out = torch.einsum("...gk,gok->...go", rows, c.canonical(layer.weight).flatten(2)).flatten(-2) + layer.bias
    assert torch.allclose(out, layer(x).movedim(c.output_dim, -1))
