"""Blocks that do something else at another size."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, axis, block, layer


@block()
class PadToMultiple(Block):
    """Pads to a multiple, computes, and crops."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6, 3), 6
        self.multiple, self.value = draw.choice([2, 4]), draw.choice([0.0, 1.0])
        self.crops = draw.random() < 0.7

    def forward(self, x: Tensor) -> Any:
        """Return features of the input's size, or of the padded one."""
        k = self.multiple
        if x.ndim == 3:
            y = F.pad(x, (0, 0, 0, -x.shape[1] % k), value=self.value)
            y = self.body(y).sigmoid()
            return y[:, : x.shape[1]] if self.crops else y
        h, w = x.shape[2:]
        y = self.body(F.pad(x, (0, (k - w % k) % k, 0, (k - h % k) % k), value=self.value)).sigmoid()
        return y[:, :, :h, :w] if self.crops else y


@block("image")
class Windows(Block):
    """Windows of two, after a pad to full ones."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.inner, self.out = nn.Linear(width, 6), 6
        self.shift = draw.choice([0, 1])

    def forward(self, x: Tensor) -> Any:
        """Return windows whose tokens see each other."""
        n, c, h, w = x.shape
        x = F.pad(x, (0, w % 2, 0, h % 2)).permute(0, 2, 3, 1)
        if self.shift:
            x = torch.roll(x, (-1, -1), (1, 2))
        tall, wide = x.shape[1:3]
        y = x.view(n, tall // 2, 2, wide // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        y = self.inner(y)
        y = y + y.mean(1, keepdim=True)
        y = y.view(n, tall // 2, wide // 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(n, tall, wide, 6)
        return y[:, :h, :w].permute(0, 3, 1, 2)


@block("image")
class Skip(Block):
    """Down and up again, matched to the skip: padded, cropped or resized."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.down, self.up = nn.Conv2d(width, 6, 3, stride=2, padding=1), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.how = draw.choice(["pad", "crop", "resize", "condition", "reflect"])
        self.adds = draw.random() < 0.3
        self.same, self.out = nn.Conv2d(width, 4, 1), 4 if self.adds else width + 4

    def forward(self, x: Tensor) -> Any:
        """Return both."""
        y = self.up(self.down(x).relu())
        tall, wide = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
        if self.how == "pad":
            y = F.pad(y, [wide // 2, wide - wide // 2, tall // 2, tall - tall // 2])
        elif self.how == "crop":
            y = y[:, :, : x.shape[2], : x.shape[3]]
        elif self.how == "resize":
            y = F.interpolate(y, size=x.shape[2:], mode="nearest")
        elif self.how == "reflect":
            y = F.pad(y, [wide, 0, tall, 0], mode="replicate") if wide >= 0 else y[:, :, :tall, :wide]
            y = y[:, :, : x.shape[2], : x.shape[3]]
        elif y.shape != x.shape:
            y = F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.same(x) + y if self.adds else torch.cat([x, y], 1)


@block()
class IfOdd(Block):
    """A pad and a layer where a size is odd."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.odd = layer(kind, width, width)

    def forward(self, x: Tensor) -> Any:
        """Return features of an even size."""
        n = x.shape[-1] if x.ndim == 4 else x.shape[1]
        if n % 2:
            x = self.odd(F.pad(x, (0, 1) if x.ndim == 4 else (0, 0, 0, 1)))
        return x.sigmoid()


@block("image")
class AdaptivePool(Block):
    """A fixed grid whatever the size, flat or resized."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.grid, self.largest = draw.choice([1, 2, 3]), draw.random() < 0.5
        self.flat, self.out = draw.random() < 0.5, width
        self.mixed = nn.Linear(width * self.grid**2, width)

    def forward(self, x: Tensor) -> Any:
        """Return the input and its pooled parts."""
        pool = F.adaptive_max_pool2d if self.largest else F.adaptive_avg_pool2d
        y = pool(x, self.grid)
        if self.flat:
            return x + self.mixed(y.flatten(1))[:, :, None, None]
        return x + F.interpolate(y, x.shape[2:], mode="bilinear", align_corners=False)


@block()
class Positions(Block):
    """Learned positions, cut to length or resized."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.grid = nn.Parameter(torch.randn(1, width, 5, 5) if kind == "image" else torch.randn(1, 12, width))
        self.enter = layer(kind, width, width)

    def forward(self, x: Tensor) -> Any:
        """Return features with positions."""
        if x.ndim == 3:
            return self.enter(x) + self.grid[:, : x.shape[1]]
        grid = self.grid
        if grid.shape[2:] != x.shape[2:]:
            grid = F.interpolate(grid, x.shape[2:], mode="bicubic", align_corners=False)
        return self.enter(x) + grid


@block()
class RelativeBias(Block):
    """A bias by distance, in attention over positions."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.values, self.out = layer(kind, width, 6), 6
        self.bias = nn.Parameter(torch.randn(31))

    def forward(self, x: Tensor) -> Any:
        """Return mixed values."""
        v = self.values(x)
        v = v.flatten(2).mT if v.ndim == 4 else v
        n = v.shape[1]
        distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp(-15, 15) + 15
        y = (self.bias[distance] + v @ v.mT).softmax(-1) @ v
        return y.mT.unflatten(2, x.shape[2:]) if x.ndim == 4 else y


@block()
class Coordinates(Block):
    """Channels that hold positions."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.mixes, self.out = layer(kind, width + 1, 6, 3), 6

    def forward(self, x: Tensor) -> Any:
        """Return features with coordinates."""
        n = x.shape[-1] if x.ndim == 4 else x.shape[1]
        ramp = torch.linspace(-1, 1, n, dtype=x.dtype)
        ramp = ramp.expand(x.shape[0], 1, *x.shape[2:]) if x.ndim == 4 else ramp[:, None].expand(x.shape[0], n, 1)
        return self.mixes(torch.cat([x, ramp], axis(x)))


@block("image")
class SamePadding(Block):
    """TensorFlow's padding: as much as the size needs."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.conv, self.out = nn.Conv2d(width, 6, 3, stride=2), 6

    def forward(self, x: Tensor) -> Any:
        """Return features of half the size."""
        pads = []
        for n in reversed(x.shape[2:]):
            pad = max((math.ceil(n / 2) - 1) * 2 + 3 - n, 0)
            pads += [pad // 2, pad - pad // 2]
        return self.conv(F.pad(x, pads)).sigmoid()


@block()
class HalfSpace(Block):
    """Only the first half of the positions is changed."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.part, self.how = layer(kind, width, width), draw.choice(["cat", "write", "where"])

    def forward(self, x: Tensor) -> Any:
        """Return both halves."""
        d = 2 if x.ndim == 4 else 1
        half = x.shape[d] // 2
        first = self.part(x.narrow(d, 0, half))
        if self.how == "cat":
            return torch.cat([first, x.narrow(d, half, x.shape[d] - half)], d)
        if self.how == "write":
            y = x.clone()
            y.narrow(d, 0, half).copy_(first)
            return y
        row = torch.arange(x.shape[d]) < half
        return torch.where(row[:, None], self.part(x), x)


@block("image")
class LargePooled(Block):
    """Large pictures are pooled; small ones run through another layer."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.large, self.small, self.limit = nn.Conv2d(width, 6, 1), nn.Conv2d(width, 6, 1), draw.choice([5, 7, 9])
        self.out = 6

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        if x.shape[-1] > self.limit:
            return self.large(F.avg_pool2d(x, 2))
        return self.small(x).relu()


@block()
class ScaledBySize(Block):
    """Divides by the number of positions, or samples."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.how, self.enter = draw.choice(["positions", "batch", "channels", "all"]), layer(kind, width, width)

    def forward(self, x: Tensor) -> Any:
        """Return scaled features."""
        y = self.enter(x)
        if self.how == "positions":
            return y / math.sqrt(x.shape[-1] if x.ndim == 4 else x.shape[1])
        if self.how == "batch":
            return y / len(x)
        return y / (y.shape[axis(y)] ** 0.5 if self.how == "channels" else math.log(y.numel() + 2))


@block("image")
class BatchDeviation(Block):
    """The deviation within groups of samples as a further channel (StyleGAN2)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.conv, self.out = nn.Conv2d(width + 1, 6, 1), 6

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        n, c, h, w = x.shape
        group = next(g for g in (3, 2, 1) if n % g == 0)
        y = x.reshape(group, -1, c, h, w)
        y = (y - y.mean(0)).square().mean(0).add(1e-6).sqrt().mean((1, 2, 3), keepdim=True)
        return self.conv(torch.cat([x, y.repeat(group, 1, h, w)], 1))


@block()
class AcrossBatch(Block):
    """Samples see each other: their mean, their neighbour, a permutation by half."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.how = draw.choice(["mean", "roll", "halves"])

    def forward(self, x: Tensor) -> Any:
        """Return mixed samples."""
        if self.how == "mean":
            return x - x.mean(0, keepdim=True)
        if self.how == "roll":
            return 0.7 * x + 0.3 * x.roll(1, 0)
        half = len(x) // 2
        return torch.cat([x[half:], x[:half]]) + x


@block("image")
class TemporalShift(Block):
    """Some channels move along the positions (TSM)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out, self.leaves = nn.Conv2d(width, 8, 1), 8, nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Any:
        """Return shifted features."""
        y = self.enter(x)
        fold = y.shape[1] // 4
        z = torch.zeros_like(y)
        z[:, :fold, :, :-1] = y[:, :fold, :, 1:]
        z[:, fold : 2 * fold, :, 1:] = y[:, fold : 2 * fold, :, :-1]
        z[:, 2 * fold :] = y[:, 2 * fold :]
        return self.leaves(z)


@block()
class Canvas(Block):
    """Features are written into a canvas of another size."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        self.value, self.least = draw.choice([0.0, 0.5]), draw.choice([3, 8])

    def forward(self, x: Tensor) -> Any:
        """Return the canvas."""
        y = self.body(x)
        if y.ndim == 3:
            z = y.new_full((len(y), max(y.shape[1], self.least), 6), self.value)
            z[:, : y.shape[1]] = y
            return z
        z = y.new_full((len(y), 6, max(y.shape[2], self.least), y.shape[3] + 1), self.value)
        z[:, :, : y.shape[2], 1:] = y
        return z


@block("image")
class Unfolded(Block):
    """Neighbours by unfold, mixed, and folded again."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.weights, self.out = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 9, 1), 4

    def forward(self, x: Tensor) -> Any:
        """Return a mean of neighbours with weights of their own (involution)."""
        n, _, h, w = x.shape
        patches = F.unfold(self.enter(x), 3, padding=1).view(n, 4, 9, h, w)
        return (patches * self.weights(x).softmax(1)[:, None]).sum(2)


@block("tokens")
class Causal(Block):
    """A mask that follows from the length, in a buffer that is cut."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.qk, self.v, self.out = nn.Linear(width, 10), nn.Linear(width, 6), 6
        self.register_buffer("causal", torch.ones(16, 16).tril().bool(), persistent=draw.random() < 0.5)
        self.stored = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return attended values."""
        q, k = self.qk(x).split(5, -1)
        t = x.shape[1]
        mask = self.causal[:t, :t] if self.stored else torch.ones(t, t, dtype=torch.bool).tril()
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ self.v(x)


@block("tokens")
class ClassToken(Block):
    """A token in front, and pooling of pairs with what is left over."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.token, self.merge = nn.Parameter(torch.randn(1, 1, width)), nn.Linear(2 * width, 6)
        self.out = 6

    def forward(self, x: Tensor) -> Any:
        """Return merged tokens (Swin's patch merging)."""
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        if x.shape[1] % 2 == 1:
            x = F.pad(x, (0, 0, 0, 1))
        return self.merge(torch.cat([x[:, 0::2], x[:, 1::2]], -1)).relu()


@block("tokens")
class Chunked(Block):
    """Chunks of three tokens, the last one shorter."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.inner, self.how = nn.Linear(width, width), draw.choice(["split", "chunk", "range"])

    def forward(self, x: Tensor) -> Any:
        """Return tokens, each with the mean of its chunk."""
        if self.how == "split":
            parts = list(x.split(3, 1))
        elif self.how == "chunk":
            parts = list(x.chunk(2, 1))
        else:
            parts = [x[:, n : n + 3] for n in range(0, x.shape[1], 3)]
        return torch.cat([part + self.inner(part).mean(1, keepdim=True) for part in parts], 1)
