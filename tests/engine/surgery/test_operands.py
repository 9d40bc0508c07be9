"""Numbers in syntax trees, and slices whose bounds are written in the code."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.surgery.operands import Bounds
from tests.engine.attentions import pins_of
from tests.engine.exactness import check_exact, randomised


class Fused(nn.Module):
    """Attention that takes queries, keys and values out of one projection by bounds computed from sizes (Phi-3)."""

    def __init__(self, literal: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.literal = 4, 2, literal
        self.embed, self.qkv = nn.Linear(3, 8), nn.Linear(8, 24)
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, tokens, 2)."""
        qkv = self.qkv(self.embed(x))
        end = 8 if self.literal else self.heads * self.head_dim
        q, k, v = qkv[..., :end], qkv[..., end : 2 * end], qkv[..., 2 * end :]
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (y.view(shape).transpose(1, 2) for y in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        scores: Tensor = self.head(self.out(y.transpose(1, 2).flatten(2)))
        return scores


@pytest.mark.parametrize("literal", [True, False])
def test_heads_go_where_bounds_of_slices_are_computed(literal: bool) -> None:
    """Start and end of each slice are pinned; a number that the author wrote down keeps the heads."""
    model, x = randomised(Fused(literal)), torch.randn(2, 5, 3).double()
    closed = torch.tensor([2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23])
    masks = {"qkv": {"weight": torch.ones(24, 8).index_fill(0, closed, 0), "bias": torch.ones(24)}}
    masks["qkv"]["bias"][closed] = 0
    plan = check_exact(model, masks, x, torch.randn(3, 7, 3).double())
    assert plan.is_empty == literal
    if not literal:
        assert plan.slices["qkv.weight"].shape == (12, 8) and plan.slices["out.weight"].shape == (8, 4)
        assert {(pin.operator, pin.value) for pin in pins_of(plan)} == {("Subscript", 4), ("Subscript", 8)}
        again = engine.Plan.from_state_dict(plan.state_dict()).apply(randomised(Fused(literal)))
        assert again(x).shape == (2, 5, 2)


@pytest.mark.parametrize("text", ["x[0]", "x[:]", "x[a:b, c:d]", "x[..., None]"])
def test_only_a_single_slice_has_bounds(text: str) -> None:
    """Of several it would not be known which one a number belongs to."""
    assert Bounds.of(ast.parse(text, mode="eval").body) is None  # type: ignore[attr-defined, arg-type]
