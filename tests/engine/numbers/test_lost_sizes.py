"""Which sizes stand behind a plain number."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from engine.numbers.lost_sizes import lost_sizes
from engine.numbers.sizes import Shape, Size
from engine.program.expressions import ShapeOf
from engine.program.graph import Value

VALUE = Value(0, (2, 8), torch.float32)
SIZES = Shape(Size(n, ShapeOf(VALUE, d)) for d, n in enumerate((2, 8)))
X = torch.zeros(2, 8)


class _Recorder(Tensor):
    """Asks for the sizes behind the numbers that a product receives."""

    lost: list[int]

    def __mul__(self, other: Any) -> Any:
        self.lost = sorted(map(int, lost_sizes([other], sys._getframe(1), lambda x, sizes: SIZES)))
        return self

    __rmul__ = __mul__


def _sizes(product: _Recorder) -> list[int]:
    return product.lost


def test_what_a_number_is_computed_of() -> None:
    """In the call itself, by way of variables, in other functions, and of views."""
    x = X.as_subclass(_Recorder)
    scale = 1.0 / x.shape[1]
    half = 0.5
    half *= x.size(0)
    assert _sizes(x * (0.5 * x.shape[1])) == [8]
    assert _sizes(x * scale) == [8]
    assert _sizes(x * half) == [2]
    assert _sizes(x * math.comb(x.shape[-1], 2)) == [8]
    assert _sizes(x * x.stride(0)) == [2, 8]
    assert _sizes(x * (0.5 * x.ndim * x.shape[1])) == [8]
    assert _sizes(x * float(f"{x.T.shape[0]}")) == [2, 8]


def test_what_has_nothing_to_do_with_sizes() -> None:
    """Literals, attributes, and what is tracked all the way."""
    x, layer = X.as_subclass(_Recorder), nn.LayerNorm(8)
    layer.scale = 0.3
    width = SIZES[1]
    assert _sizes(x * 0.5) == []
    assert _sizes(x * layer.scale) == []
    assert _sizes(x * layer.eps) == []
    assert _sizes(x * (2 * width)) == []
    lead = x.shape[:-1]
    shape = (-1,) + lead[1:] + (x.size(-1),)  # GPT-2's
    assert _sizes(x * shape[0]) == _sizes(x * (lead[:1] + (1, x.size(-1)))[1]) == []
    split = x.size()[:-1] + (2, -1)  # that of older attention in transformers
    assert _sizes(x * split[-1]) == []
    assert _sizes(x * (0.5 * x.size()[-1])) == [2, 8]  # which dimension is not followed
    assert _sizes(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))) == []  # GPT-2's activation
    assert _sizes(x * len(x.shape)) == _sizes(x * list(range(1, len(x.size())))[0]) == []
    assert _sizes(x * sum(x.shape[:1])) == _sizes(x * max(2, x.shape[1])) == _sizes(x * (x.shape[1] // 2)) == []
    assert _sizes(x.view(2, 8) * layer.scale) == []
