"""Blocks that read their own widths, fold dimensions into each other, or penalise weights."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, along, axis, block, layer, positions


@block()
class ReadsWidth(Block):
    """Asks its layers for their widths."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.wide, self.narrow = layer(kind, width, 8), layer(kind, 8, 6)
        self.out, self.how = 6, draw.choice(["scale", "parameters", "shape", "halves", "heads", "loop"])

    def forward(self, x: Tensor) -> Any:
        """Return features, scaled by what the layers say."""
        y = self.wide(x).relu()
        if self.how == "scale":
            y = y / math.sqrt(self.wide.weight.shape[0])
        elif self.how == "parameters":
            y = y / math.log(sum(p.numel() for p in self.parameters()))
        elif self.how == "shape":
            y = y.reshape(y.shape[0], -1, *y.shape[2:]) if y.ndim == 4 else y.reshape(*y.shape[:2], -1)
            y = y * (1 / y.size(axis(y)))
        elif self.how == "halves":
            k = y.shape[axis(y)] // 2
            y = torch.cat([y.narrow(axis(y), k, k), y.narrow(axis(y), 0, k)], axis(y))
        elif self.how == "heads":
            z = y.movedim(axis(y), -1)
            z = z.view(*z.shape[:-1], z.shape[-1] // 4, 4)
            y = (z - z.mean(-1, keepdim=True)).flatten(-2).movedim(-1, axis(y))
        else:
            y = torch.stack([channel * (n + 1) for n, channel in enumerate(y.unbind(axis(y)))], axis(y))
        return self.narrow(y)


@block()
class ReadsAttributes(Block):
    """Asks its layers for `out_channels`, `in_features` or a norm's `num_features`."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.one, self.two, self.out = layer(kind, width, 8), layer(kind, 8, 6), 6
        self.norm = nn.BatchNorm2d(8) if kind == "image" else nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        """Return scaled features."""
        y = self.norm(self.one(x)).relu()
        n = self.two.in_channels if x.ndim == 4 else self.two.in_features
        return self.two(y * n**-0.5)


@block()
class Penalised(Block):
    """Returns a penalty of its weights."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.one, self.two, self.out = layer(kind, width, 8), layer(kind, 8, 6), 6
        self.how = draw.choice(["square", "group", "orthogonal", "all", "mean", "weight"])

    def forward(self, x: Tensor) -> Any:
        """Return features and the penalty."""
        y, w = self.two(self.one(x).relu()), self.one.weight.flatten(1)
        if self.how == "square":
            return y, w.square().sum()
        if self.how == "group":
            return y, w.square().sum(1).add(1e-12).sqrt().sum() * math.sqrt(w.shape[0])
        if self.how == "orthogonal":
            return y, (w @ w.T - torch.eye(len(w), dtype=w.dtype)).square().sum()
        if self.how == "all":
            return y, sum(p.square().sum() for p in self.parameters())
        return y, w.abs().mean() if self.how == "mean" else self.one.weight


@block("image")
class BatchIntoSpace(Block):
    """Folds rows into the batch (axial attention), or pixels."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.qkv, self.out, self.rows = nn.Linear(width, 18), 6, draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return attended rows or columns."""
        n, c, h, w = x.shape
        y = x.permute(0, 2, 3, 1).reshape(n * h, w, c) if self.rows else x.permute(0, 3, 2, 1).reshape(n * w, h, c)
        q, k, v = self.qkv(y).chunk(3, -1)
        y = (q @ k.mT * 6**-0.5).softmax(-1) @ v
        return y.view(n, h, w, 6).permute(0, 3, 1, 2) if self.rows else y.view(n, w, h, 6).permute(0, 3, 2, 1)


@block("image")
class PerSampleConv(Block):
    """Samples as groups of one convolution (StyleGAN2)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.style, self.weight, self.out = nn.Linear(width, width), nn.Parameter(torch.randn(6, width, 3, 3)), 6
        self.demodulates = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return modulated features."""
        n, c, h, w = x.shape
        weight = self.weight[None] * self.style(x.mean((2, 3))).view(n, 1, c, 1, 1)
        if self.demodulates:
            weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-3)
        y = F.conv2d(x.reshape(1, n * c, h, w), weight.view(n * 6, c, 3, 3), padding=1, groups=n)
        return y.view(n, 6, h, w)


@block("image")
class Pixels(Block):
    """Pixels become channels and back, or a patch becomes a token."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.up, self.fine = nn.Conv2d(width, 8, 1), nn.Conv2d(2, 6, 1)
        self.patch, self.back = nn.Conv2d(width, 6, 2, stride=2), nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.shuffles, self.out = draw.random() < 0.5, 6

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        if self.shuffles:
            return self.fine(F.pixel_shuffle(self.up(x), 2).relu())
        return self.back(self.patch(x).relu())


@block("image")
class Pools(Block):
    """Pools, strides, and sizes that are rounded up or down."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = nn.Conv2d(width, 6, 1), 6
        self.how = draw.choice(["ceil", "average", "indices", "lp", "strip", "pyramid", "scale"])

    def forward(self, x: Tensor) -> Any:
        """Return pooled features."""
        y = self.enter(x)
        if self.how == "ceil":
            return F.max_pool2d(y, 3, 2, 1, ceil_mode=True)
        if self.how == "average":
            return F.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        if self.how == "indices":
            z, at = F.max_pool2d(y, 2, return_indices=True)
            return F.max_unpool2d(z.relu(), at, 2, output_size=y.shape[2:])
        if self.how == "lp":
            return F.lp_pool2d(y.abs() + 0.1, 2.0, 2)
        if self.how == "strip":
            return y * F.adaptive_avg_pool2d(y, (None, 1)).sigmoid() * F.adaptive_max_pool2d(y, (1, None)).tanh()
        if self.how == "pyramid":
            parts = [F.interpolate(F.adaptive_avg_pool2d(y, n), y.shape[2:]) for n in (1, 2, 3)]
            return torch.cat([y, *parts], 1)[:, ::4]
        return F.interpolate(y, scale_factor=1.5, mode="bilinear", align_corners=True)


@block("image")
class Warped(Block):
    """Samples the features where a small network says (spatial transformer)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.theta, self.padding = nn.Linear(width, 6), draw.choice(["zeros", "border"])

    def forward(self, x: Tensor) -> Any:
        """Return warped features."""
        theta = self.theta(x.mean((2, 3))).view(-1, 2, 3) * 0.1
        theta = theta + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode=self.padding, align_corners=False)


@block("tokens")
class Convolved(Block):
    """A convolution over tokens: causal, depthwise, with a norm over channels in the middle."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.wide = nn.Conv1d(width, 8, 1)
        self.conv, self.norm, self.out = nn.Conv1d(8, 8, 3, groups=draw.choice([1, 8])), nn.BatchNorm1d(8), 8
        self.causal = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return tokens."""
        y = self.wide(x.transpose(1, 2)).relu()
        y = F.pad(y, (2, 0) if self.causal else (1, 1))
        return self.norm(self.conv(y)).transpose(1, 2)


@block("tokens")
class Encoder(Block):
    """A stock encoder layer, with a mask from the data or a causal one."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out, self.how = nn.Linear(width, 8), 8, draw.choice(["none", "padding", "causal"])
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=draw.random() < 0.5)

    def forward(self, x: Tensor) -> Any:
        """Return tokens."""
        y = self.enter(x)
        if self.how == "padding":
            mask = x.mean(-1) > 1.0
            mask[:, 0] = False
            return self.layer(y, src_key_padding_mask=mask)
        if self.how == "causal":
            return self.layer(y, src_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1))
        return self.layer(y)


@block("tokens")
class Memory(Block):
    """Attention to learned tokens (Perceiver), with keys and values of one layer."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.learned, self.out = nn.Parameter(torch.randn(3, 6)), 6
        self.query, self.keyval = nn.Linear(6, 4), nn.Linear(width, 4 + 6)
        self.expand = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return the learned tokens with what they read."""
        k, v = self.keyval(x).split([4, 6], -1)
        y = self.learned + (self.query(self.learned) @ k.mT).softmax(-1) @ v
        return torch.cat([y, v], 1) if self.expand else y


@block("tokens")
class Sequence(Block):
    """A recurrent layer on packed tokens, or one whose last state is spread."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.layer, self.out = nn.LSTM(width, 5, batch_first=True, num_layers=draw.choice([1, 2])), 5
        self.how = draw.choice(["packed", "last", "flipped", "started"])
        self.start = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        """Return states."""
        if self.how == "packed":
            lengths = torch.arange(len(x), 0, -1).clamp(max=x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        if self.how == "last":
            states, (h, _) = self.layer(x)
            return states + h[-1][:, None]
        if self.how == "flipped":
            return self.layer(x.flip(1))[0].flip(1)
        h = self.start(x.mean(1)).tanh().expand(self.layer.num_layers, -1, -1).contiguous()
        return self.layer(x, (h, torch.zeros_like(h)))[0]


@block()
class Statistics(Block):
    """Norms by hand: over positions, groups, samples, with learned scale."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 8), 8
        self.gain, self.offset = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.how = draw.choice(["instance", "group", "rms", "response", "layer", "std"])

    def forward(self, x: Tensor) -> Any:
        """Return normalised features."""
        y = self.enter(x)
        d, spots = axis(y), positions(y)
        if self.how == "instance":
            y = (y - y.mean(spots, keepdim=True)) * (y.var(spots, keepdim=True, correction=0) + 0.1).rsqrt()
        elif self.how == "group":
            z = y.unflatten(d, (2, 4))
            z = (z - z.mean(d + 1, keepdim=True)) / (z.var(d + 1, keepdim=True) + 0.1).sqrt()
            y = z.flatten(d, d + 1)
        elif self.how == "rms":
            y = y * (y.square().mean(d, keepdim=True) + 0.1).rsqrt()
        elif self.how == "response":
            energy = y.square().sum(spots, keepdim=True).add(1e-3).sqrt()
            y = y * (energy / (energy.mean(d, keepdim=True) + 1e-2))
        elif self.how == "layer":
            y = F.layer_norm(y.movedim(d, -1), (8,), self.gain, self.offset, 0.1).movedim(-1, d)
        else:
            y = torch.cat([y.narrow(d, 0, 7), y.std(d, keepdim=True)], d)
        return y * along(y, self.gain) + along(y, self.offset)


@block()
class Outer(Block):
    """Products between channels: Gram matrices, outer products, covariance, channel attention."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.after, self.out = layer(kind, width, 4), nn.Linear(16, 6), 6
        self.how = draw.choice(["gram", "channel attention", "bilinear"])
        self.last, self.both = layer(kind, 4, 6), nn.Bilinear(4, 4, 6)

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.enter(x)
        z = y.flatten(2) if y.ndim == 4 else y.mT
        if self.how == "channel attention":
            z = (z @ z.mT / 4).softmax(-1) @ z
            return self.last(z.view_as(y) if y.ndim == 4 else z.mT)
        if self.how == "bilinear":
            u = z.mT
            return self.both(u, u.tanh()).mT.unflatten(2, y.shape[2:]) if y.ndim == 4 else self.both(u, u.tanh())
        g = self.after((z @ z.mT / z.shape[2]).flatten(1))
        return self.last(y) + (g[:, :, None, None] if y.ndim == 4 else g[:, None])
