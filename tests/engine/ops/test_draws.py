"""Draws that are the same in networks of different widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops.draws import EvenDraws


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like,
        torch.rand_like,
        lambda x: torch.randn(x.shape),
        lambda x: torch.empty_like(x).normal_(1, 2),
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    ],
)
def test_all_entries_are_one_number_whatever_their_count(draw: Callable[[Tensor], Tensor]) -> None:
    """Of 3 entries as of 40, and it is not zero."""
    with EvenDraws():
        few = draw(torch.ones(3))
    with EvenDraws():
        many = draw(torch.ones(8, 5))
    assert few[0] != 0 and (few == few[0]).all() and (many == few[0]).all()


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout2d(0.4)])
def test_dropout_is_the_identity(layer: nn.Module) -> None:
    """Of every kind, and it is said."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    with EvenDraws() as draws:
        torch.testing.assert_close(layer.train()(x), x)
    assert draws.dropped


def test_dropout_inside_of_other_ops() -> None:
    """Attention and recurrent layers drop inside."""
    q = torch.randn(1, 2, 3, 4)
    with EvenDraws():
        out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))
    layer, x = nn.LSTM(3, 4, 2, dropout=0.5), torch.randn(5, 1, 3)
    with EvenDraws():
        dropped = layer(x)[0]
    torch.testing.assert_close(dropped, layer.eval()(x)[0])


def test_whole_numbers_are_drawn_anew() -> None:
    """A permutation does not depend on what was drawn before it."""
    with EvenDraws():
        torch.rand(3)
        one = torch.randperm(9)
    with EvenDraws():
        torch.rand(7)
        other = torch.randperm(9)
    assert torch.equal(one, other)
