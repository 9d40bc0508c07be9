"""Blocks in which Python reads tensors, or data decides what is computed."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, along, axis, block, layer, positions


@block()
class ItemScale(Block):
    """Scales by a number that Python reads."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.read = draw.choice(["mean", "max", "std", "norm"])

    def forward(self, x: Tensor) -> Any:
        """Return the input over its size."""
        value = float(getattr(x.detach(), self.read)())
        return x / (1.0 + abs(value))


@block()
class ListBias(Block):
    """Adds what went through a list of Python's."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.through = draw.choice(["list", "array", "numbers"])

    def forward(self, x: Tensor) -> Any:
        """Return the input and its means."""
        means = x.detach().mean((0, *positions(x)))
        if self.through == "list":
            shift = torch.tensor(means.tolist(), dtype=x.dtype)
        elif self.through == "array":
            shift = torch.from_numpy(means.numpy().copy())
        else:
            shift = x.new_tensor([float(v) * 0.5 for v in means])
        return x + along(x, shift)


@block()
class TwoWays(Block):
    """One layer or the other, as the data says."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.out = 6
        self.high, self.low, self.limit = layer(kind, width, 6), layer(kind, width, 6), draw.choice([-0.2, 0.0, 0.3])

    def forward(self, x: Tensor) -> Any:
        """Return features of one of the layers."""
        if x.mean() > self.limit:
            return self.high(x).relu()
        return self.low(x).tanh()


@block()
class StrongestChannels(Block):
    """Keeps channels that the data picks."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.how, self.out = draw.choice(["topk", "gather", "sort"]), 3
        self.enter = layer(kind, width, 6)

    def forward(self, x: Tensor) -> Any:
        """Return three channels."""
        y = self.enter(x)
        energy = y.square().mean((0, *positions(y)))
        if self.how == "topk":
            return y.index_select(axis(y), energy.topk(3).indices)
        if self.how == "sort":
            return y.index_select(axis(y), energy.argsort(descending=True)[:3])
        shape = [3, *y.shape[2:]] if y.ndim == 4 else [y.shape[1], 3]
        index = along(y, energy.topk(3).indices).expand(y.shape[0], *shape)
        return y.gather(axis(y), index)


@block()
class Selected(Block):
    """The mean of what a mask selects is added."""

    def forward(self, x: Tensor) -> Any:
        """Return the input and a number."""
        chosen = x[x > x.mean()]
        return x + (chosen.mean() if len(chosen) else 0.0)


@block()
class Bounded(Block):
    """Clamps to what the data says."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 6), 6

    def forward(self, x: Tensor) -> Any:
        """Return bounded features."""
        y = self.enter(x)
        bound = float(y.detach().abs().mean())
        return y.clamp(-bound, bound)


@block()
class Counted(Block):
    """Divides by the number of entries that are not zero."""

    def forward(self, x: Tensor) -> Any:
        """Return sparse features, scaled."""
        y = torch.relu(x)
        return y * (1 + 10.0 / (1 + len(y.nonzero())))


@block()
class Quantised(Block):
    """Looks codes up that follow from the data."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.table, self.mix = nn.Embedding(5, 6), layer(kind, 6, 4)
        self.out = 4

    def forward(self, x: Tensor) -> Any:
        """Return embedded levels."""
        levels = (x.mean(axis(x)) * 4).long().clamp(0, 4)
        y = self.table(levels)
        return self.mix(y.permute(0, 3, 1, 2) if x.ndim == 4 else y).relu()


@block()
class Nearest(Block):
    """The nearest code of a book (VQ), straight through, with its loss."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.book, self.out = nn.Parameter(torch.randn(5, width)), width

    def forward(self, x: Tensor) -> Any:
        """Return codes, and the loss."""
        z = x.movedim(axis(x), -1)
        flat = z.reshape(-1, z.shape[-1])
        code = torch.cdist(flat, self.book).argmin(-1)
        q = self.book[code].view_as(z)
        loss = (q - z.detach()).square().mean()
        return (z + (q - z).detach()).movedim(-1, axis(x)), loss


@block()
class Rolled(Block):
    """Rolls by a position that the data gives."""

    def forward(self, x: Tensor) -> Any:
        """Return shifted features."""
        at = int(x.detach().abs().mean((0, axis(x))).flatten().argmax())
        return x + torch.roll(x, at, -1 if x.ndim == 4 else 1)


@block()
class Compared(Block):
    """Asks whether two tensors agree."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.one, self.other, self.out = layer(kind, width, 6), layer(kind, width, 6), 6

    def forward(self, x: Tensor) -> Any:
        """Return one of two features."""
        a, b = self.one(x).relu(), self.other(x).relu()
        if torch.allclose(a, b) or a.sum() < b.sum():
            return b - a
        return a * 0.5


@block()
class Checked(Block):
    """Raises where something is not finite."""

    def forward(self, x: Tensor) -> Any:
        """Return the input."""
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        if (x.abs() > 1e12).any():
            x = x.clamp(-1e12, 1e12)
        return x


@block()
class EarlyExit(Block):
    """Stops where the data is sure."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.stages = nn.ModuleList(layer(kind, width, width) for _ in range(3))
        self.limit = draw.choice([0.1, 0.3, 0.6])

    def forward(self, x: Tensor) -> Any:
        """Return features of the stage at which it stops."""
        for stage in self.stages:
            x = stage(x).tanh()
            if x.abs().mean().item() > self.limit:
                break
        return x


@block()
class CountedLoop(Block):
    """Runs as often as the data says."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.step = layer(kind, width, width)

    def forward(self, x: Tensor) -> Any:
        """Return features after some steps."""
        for _ in range(1 + int(x.detach().max().clamp(0, 2))):
            x = self.step(x).sigmoid()
        return x


@block()
class HaltingSteps(Block):
    """Adaptive computation time."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.step, self.halt = layer(kind, width, width), layer(kind, width, 1)

    def forward(self, x: Tensor) -> Any:
        """Return the weighted states, and the cost of pondering."""
        total, result = 0.0, torch.zeros_like(x)
        steps = 0
        for _ in range(4):
            steps += 1
            x = self.step(x).tanh()
            p = self.halt(x).sigmoid().mean()
            result = result + p * x
            total = total + float(p.detach())
            if total > 0.9:
                break
        return result, steps


@block()
class Experts(Block):
    """Each sample to one expert."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(layer(kind, width, 6) for _ in range(3))
        self.out, self.how = 6, draw.choice(["loop", "where", "add"])

    def forward(self, x: Tensor) -> Any:
        """Return what the experts give, and the loss that balances them."""
        scores = self.router(x.mean(positions(x))).softmax(-1)
        best, balance = scores.argmax(-1), (scores.mean(0) ** 2).sum()
        result = torch.zeros_like(self.experts[0](x))
        for n, expert in enumerate(self.experts):
            rows = (best == n).nonzero().flatten()
            if self.how == "loop" and not len(rows):
                continue
            weight = scores[rows, n].view(-1, *[1] * (x.ndim - 1))
            if self.how == "add":
                result = result.index_add(0, rows, expert(x[rows]) * weight)
            else:
                result[rows] = expert(x[rows]) * weight
        return result, balance


@block("tokens")
class PrunedTokens(Block):
    """Keeps the strongest tokens."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.score, self.half = nn.Linear(width, 1), draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return fewer tokens."""
        scores = self.score(x).squeeze(-1)
        number = max(1, x.shape[1] // 2) if self.half else min(3, x.shape[1])
        kept = scores.topk(number, 1).indices.sort(1).values
        return x.gather(1, kept[..., None].expand(-1, -1, x.shape[2])) * scores.gather(1, kept)[..., None].sigmoid()


@block("tokens")
class Packed(Block):
    """Tokens of one list, without those that are masked out."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = nn.Linear(width, 6), 6

    def forward(self, x: Tensor) -> Any:
        """Return features where the mask is, zeros elsewhere."""
        mask = x.mean(-1) > -0.5
        packed = self.body(x[mask]).relu()
        return x.new_zeros(*x.shape[:2], 6).masked_scatter(mask[..., None], packed)
