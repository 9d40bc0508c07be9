"""Blocks that keep things in odd places, or change weights while they run."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, along, axis, block, layer, positions


@block()
class ClipsWeights(Block):
    """Clamps or normalises its weight in place before it uses it."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        self.how, self.trains = draw.choice(["clamp", "renorm", "decay"]), draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        if self.training or not self.trains:
            with torch.no_grad():
                if self.how == "clamp":
                    self.body.weight.clamp_(-0.3, 0.3)
                elif self.how == "renorm":
                    self.body.weight.copy_(torch.renorm(self.body.weight, 2, 0, 1.0))
                else:
                    self.body.weight.mul_(0.99)
        return self.body(x).relu()


@block()
class Sigma(Block):
    """Spectral norm by hand, with vectors in buffers that move at each call."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.linear, self.out = nn.Linear(width, 6), 6
        self.register_buffer("vector_u", torch.ones(6) / 6**0.5)
        self.moves = draw.choice(["training", "always"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        w = self.linear.weight
        with torch.no_grad():
            v = nn.functional.normalize(w.T @ self.vector_u, dim=0, eps=1e-6)
            u = nn.functional.normalize(w @ v, dim=0, eps=1e-6)
            if self.training or self.moves == "always":
                self.vector_u.copy_(u)
        sigma = u @ w @ v
        y = nn.functional.linear(x.movedim(axis(x), -1), w / (sigma + 0.1), self.linear.bias)
        return y.movedim(-1, axis(x))


@block()
class EveryOther(Block):
    """Another layer at every other call."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.even, self.uneven, self.tick, self.out = layer(kind, width, 6), layer(kind, width, 6), 0, 6

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        self.tick += 1
        return self.even(x).relu() if self.tick % 2 else self.uneven(x).tanh()


@block()
class LateBuffer(Block):
    """Registers a buffer, or a layer's scale, at the first call."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out, self.how = layer(kind, width, 6), 6, draw.choice(["register", "assign", "hasattr"])
        self.register_buffer("late_scale", None)

    def forward(self, x: Tensor) -> Any:
        """Return scaled features."""
        y = self.enter(x)
        size = y.detach().square().mean((0, *positions(y))).add(0.1).sqrt()
        if self.how == "hasattr":
            if not hasattr(self, "first_scale"):
                self.first_scale = size
            return y / along(y, self.first_scale)
        if self.late_scale is None:
            if self.how == "register":
                self.register_buffer("late_scale", size)
            else:
                self.late_scale = size
        return y / along(y, self.late_scale)


@block()
class Shared(Block):
    """What all blocks of the class share, in a dictionary of the class."""

    gains: ClassVar[dict[str, float]] = {"gain": 1.5}

    def forward(self, x: Tensor) -> Any:
        """Return scaled features."""
        return x * self.gains["gain"]


@functools.lru_cache(maxsize=8)
def _ramp(n: int) -> Tensor:
    return torch.linspace(0.5, 1.5, n, dtype=torch.float64)


@block()
class CachedFunction(Block):
    """A table by a cached function of the width, or of the length."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.by = draw.choice(["channels", "positions"])

    def forward(self, x: Tensor) -> Any:
        """Return scaled features."""
        if self.by == "channels":
            return x * along(x, _ramp(x.shape[axis(x)]))
        return x * (_ramp(x.shape[3]) if x.ndim == 4 else _ramp(x.shape[1])[:, None])


@block()
class Closure(Block):
    """A function that was made in the constructor, with a weight and a number inside."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.slope, self.out = nn.Parameter(torch.rand(width) + 0.5), width
        self.scale_by: Callable[[Tensor, Tensor], Tensor] = functools.partial(_scaled, amount=draw.choice([0.5, 2.0]))

    def forward(self, x: Tensor) -> Any:
        """Return scaled features."""
        return self.scale_by(x, self.slope)


def _scaled(x: Tensor, slope: Tensor, amount: float) -> Tensor:
    return torch.where(x > 0, x, x * along(x, slope) * amount)


@block()
class WritesThrough(Block):
    """Writes to features through views: detached, transposed, indexed, of a mask."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        self.how = draw.choice(["detach", "transpose", "mask", "out", "copy", "index", "diagonal", "unbind"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.body(x).clone()
        d = axis(y)
        if self.how == "detach":
            y.detach().select(d, 1).mul_(2)
        elif self.how == "transpose":
            y.transpose(0, d)[2:4] = 0.5
        elif self.how == "mask":
            y[y < 0] = 0.1
        elif self.how == "out":
            with torch.no_grad():
                z = torch.empty_like(y)
                torch.mul(y.detach(), 2.0, out=z)
            y = y + z
        elif self.how == "copy":
            y.select(d, 0).copy_(y.select(d, 5))
        elif self.how == "index":
            y.index_copy_(d, torch.tensor([4, 1]), y.narrow(d, 0, 2).clone())
        elif self.how == "diagonal":
            y.movedim(d, -1)[0].diagonal(dim1=-2, dim2=-1).add_(1.0)
        else:
            first, *rest = y.unbind(d)
            y = torch.stack([first * 2, *reversed(rest)], d)
        return y


@block()
class Attempts(Block):
    """Tries something, and does something else where it fails."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.spare, self.how = layer(kind, width, width), draw.choice(["view", "key", "raise"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        try:
            if self.how == "view":
                n = x.shape[-1] if x.ndim == 4 else x.shape[1]
                halves = x.reshape(*x.shape[:3], 2, n // 2) if x.ndim == 4 else x.reshape(len(x), 2, n // 2, -1)
                return halves.reshape(x.shape).sigmoid()
            if self.how == "key":
                return x * {0: 0.5, 2: 0.25}[x.shape[2 if x.ndim == 4 else 1] % 3]
            if len(x) > 3:
                raise NotImplementedError
            return x.tanh()
        except (RuntimeError, KeyError, NotImplementedError):
            return self.spare(x)


@block()
class Dispatched(Block):
    """Calls a method by its name, or an activation from a table."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.mode, self.table = "first", {"relu": torch.relu, "tanh": torch.tanh}
        self.left, self.right, self.act = layer(kind, width, 6), layer(kind, width, 6), draw.choice(["relu", "tanh"])
        self.out = 6

    def run_first(self, x: Tensor) -> Tensor:
        """Return features of the first layer."""
        return self.left(x)

    def run_second(self, x: Tensor) -> Tensor:
        """Return features of both layers."""
        return self.left(x) + self.right(x)

    def forward(self, x: Tensor) -> Any:
        """Return features of the method that the mode names."""
        return self.table[self.act](getattr(self, f"run_{self.mode}")(x))
