"""Blocks of every network: layers, norms, skips, gates, attention, recurrence."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, axis, block, layer, positions

__all__ = ["Plain"]


@block()
class Plain(Block):
    """A layer, perhaps a norm, an activation."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.out = draw.choice([4, 6, 8])
        self.layer = layer(kind, width, self.out, draw.choice([1, 3]))
        norms = [nn.Identity, nn.BatchNorm2d] if kind == "image" else [nn.Identity, nn.LayerNorm]
        self.norm = nn.Identity() if draw.random() < 0.5 else norms[1](self.out)
        self.act = draw.choice([nn.ReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.Softplus])()

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        return self.act(self.norm(self.layer(x)))


@block()
class Residual(Block):
    """Two layers beside a skip."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.first, self.second = layer(kind, width, 6, 3), layer(kind, 6, width)

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        return x + self.second(self.first(x).relu())


@block()
class Squeeze(Block):
    """Squeeze and excitation."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.reduce, self.expand = layer(kind, width, 4), layer(kind, 4, width)

    def forward(self, x: Tensor) -> Any:
        """Return gated channels."""
        return x * self.expand(self.reduce(x.mean(positions(x), keepdim=True)).relu()).sigmoid()


@block()
class Concatenated(Block):
    """A branch beside the input (DenseNet)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.grow = layer(kind, width, 4)
        self.out = width + 4

    def forward(self, x: Tensor) -> Any:
        """Return both."""
        return torch.cat([x, self.grow(x).relu()], axis(x))


@block()
class Gated(Block):
    """Half of the channels gate the other half."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.both, self.out, self.chunks = layer(kind, width, 12), 6, draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return a product."""
        y = self.both(x)
        if self.chunks:
            a, b = y.chunk(2, axis(y))
            return a * b.sigmoid()
        return F.glu(y, axis(y))


@block("image")
class Depthwise(Block):
    """Groups, a norm over groups, a shuffle."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.wide = nn.Conv2d(width, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=draw.choice([8, 4, 2]))
        self.norm = draw.choice([nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)])
        self.out, self.shuffle = 8, draw.random() < 0.4

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.norm(self.depth(self.wide(x).relu()))
        return torch.channel_shuffle(y, 2) if self.shuffle else y


@block("tokens")
class Attention(Block):
    """Self-attention, torch's or by hand."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = nn.Linear(width, 8), 8
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True) if draw.random() < 0.5 else None
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """Return tokens, with the weights of attention where torch computes them."""
        x = self.enter(x)
        if self.heads is not None:
            y, weights = self.heads(x, x, x)
            return x + y, weights
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))


@block("tokens")
class Recurrent(Block):
    """A recurrent layer, or a cell in a loop."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.loop, self.out = draw.random() < 0.4, 5
        if self.loop:
            self.cell = draw.choice([nn.GRUCell, nn.RNNCell])(width, 5)
        else:
            both = draw.random() < 0.3
            self.cell = draw.choice([nn.GRU, nn.LSTM, nn.RNN])(width, 5, batch_first=True, bidirectional=both)
            self.out = 10 if both else 5

    def forward(self, x: Tensor) -> Any:
        """Return all states."""
        if not self.loop:
            return self.cell(x)[0]
        state, states = x.new_zeros(x.shape[0], 5), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        return torch.stack(states, 1)


@block()
class AcrossChannels(Block):
    """Softmax, a mean, a norm or an order over channels."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 6), 6
        self.how = draw.choice(["softmax", "mean", "normalize", "var", "amax", "cumsum", "flip"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.enter(x)
        d = axis(y)
        if self.how == "softmax":
            return y * y.softmax(d)
        if self.how == "normalize":
            return F.normalize(y, dim=d, eps=1e-3)
        if self.how == "var":
            return y - y.mean(d, keepdim=True) / (y.var(d, keepdim=True) + 1)
        if self.how == "cumsum":
            return y.cumsum(d)
        if self.how == "flip":
            return y + y.flip(d)
        return y + (y.mean(d, keepdim=True) if self.how == "mean" else y.amax(d, keepdim=True))
