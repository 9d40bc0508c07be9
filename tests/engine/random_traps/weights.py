"""Blocks whose weights are shared, computed or written to, and that write in place."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as P
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.engine.random_traps.blocks import Block, along, axis, block, layer, positions


@block()
class Twice(Block):
    """One layer, called several times."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.shared, self.times = layer(kind, width, width, 3), draw.choice([2, 3])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        for _ in range(self.times):
            x = self.shared(x).tanh()
        return x


@block()
class Tied(Block):
    """A weight and its transpose (tied autoencoder)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.code, self.back = nn.Linear(width, 5), nn.Parameter(torch.zeros(width))
        self.penalty = draw.random() < 0.4

    def forward(self, x: Tensor) -> Any:
        """Return a reconstruction, and perhaps a penalty."""
        z = x.movedim(axis(x), -1)
        y = F.linear(self.code(z).relu(), self.code.weight.t(), self.back).movedim(-1, axis(x))
        return (y, self.code.weight.square().sum()) if self.penalty else y


class _Standardised(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        """Return rows of mean zero."""
        return w - w.flatten(1).mean(1).view(-1, *[1] * (w.ndim - 1))


class _Bounded(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        """Return weights of limited size."""
        return torch.tanh(w)


@block()
class Parametrised(Block):
    """A weight that is computed at each use."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        how = draw.choice(["weight norm", "spectral", "standard", "bounded"])
        if how == "weight norm":
            P.weight_norm(self.body)
        elif how == "spectral":
            P.spectral_norm(self.body)
        else:
            parametrize.register_parametrization(
                self.body, "weight", _Standardised() if how == "standard" else _Bounded()
            )

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        return self.body(x).sigmoid()


@block()
class ByHand(Block):
    """A weight that forward changes: normalised, scaled, added to, masked."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.weight, self.bias = nn.Parameter(torch.randn(6, width)), nn.Parameter(torch.randn(6))
        self.down, self.upper = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(6, 2))
        self.register_buffer("pattern", (torch.arange(6 * width).view(6, width) % 3 > 0).double())
        self.how, self.out = draw.choice(["normal", "scale", "adapter", "pattern", "einsum"]), 6

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        z = x.movedim(axis(x), -1)
        if self.how == "einsum":
            return (torch.einsum("n...c,oc->n...o", z, self.weight) + self.bias).movedim(-1, axis(x))
        w = self.weight
        if self.how == "normal":
            w = F.normalize(w, dim=1, eps=1e-3)
        elif self.how == "scale":
            w = w * (2 / w.shape[1]) ** 0.5
        elif self.how == "adapter":
            w = w + self.upper @ self.down
        else:
            w = w * self.pattern
        return F.linear(z, w, self.bias).movedim(-1, axis(x))


@block()
class Hyper(Block):
    """A small network makes the weight for each sample."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.makes, self.inputs, self.out = nn.Linear(width, 4 * width), width, 4

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        w = self.makes(x.mean(positions(x))).view(len(x), 4, self.inputs)
        z = x.movedim(axis(x), -1)
        return torch.einsum("n...c,noc->n...o", z, w).tanh().movedim(-1, axis(x))


@block()
class Modulated(Block):
    """Scale and shift from a condition (FiLM)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.film = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Any:
        """Return modulated features."""
        scale, shift = self.film(x.mean(positions(x))).chunk(2, 1)
        if x.ndim == 4:
            return x * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        return x * (1 + scale[:, None]) + shift[:, None]


@block()
class Bank(Block):
    """Experts in one parameter, chosen by attention over them."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.bank, self.pick = nn.Parameter(torch.randn(3, 6, width)), nn.Linear(width, 3)
        self.out = 6

    def forward(self, x: Tensor) -> Any:
        """Return features of a mixed weight (CondConv)."""
        w = torch.einsum("ne,eoc->noc", self.pick(x.mean(positions(x))).softmax(-1), self.bank)
        z = x.movedim(axis(x), -1).flatten(1, -2) @ w.mT
        return z.mT.unflatten(2, x.shape[2:]) if x.ndim == 4 else z


@block()
class WritesSlices(Block):
    """Writes into slices of channels and positions."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 6), 6
        self.how = draw.choice(["set", "scale", "add", "swap", "step", "fill", "view", "index"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.enter(x)
        d = axis(y)
        z = y.clone()
        if self.how == "set":
            z.narrow(d, 0, 3).copy_(y.narrow(d, 3, 3).relu())
        elif self.how == "scale":
            z.narrow(d, 1, 2).mul_(3.0)
        elif self.how == "add":
            for start in (0, 3):
                part = z.narrow(d, start, 2)
                part += 0.5
        elif self.how == "swap":
            z.narrow(d, 0, 3).copy_(y.narrow(d, 3, 3))
            z.narrow(d, 3, 3).copy_(y.narrow(d, 0, 3))
        elif self.how == "step":
            z[..., ::2] = 0.25
        elif self.how == "fill":
            z.masked_fill_(z < 0, 0.1)
        elif self.how == "view":
            z.view(-1).mul_(0.5)
        else:
            z.index_add_(d, torch.tensor([0, 2, 2]), y.narrow(d, 0, 3))
        return z


@block()
class WritesInput(Block):
    """Changes its input in place, and reads it again."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.how = layer(kind, width, width), draw.choice(["relu", "add", "part", "dropped"])

    def forward(self, x: Tensor) -> Any:
        """Return the sum of what is left."""
        x = x * 1.0
        if self.how == "relu":
            y = F.relu(x, inplace=True)
        elif self.how == "add":
            y = x.add_(0.3)
        elif self.how == "part":
            y = x.narrow(axis(x), 0, x.shape[axis(x)] // 2).sigmoid_().mean()
        else:
            y = x.mul_(0.5).detach()
        return x + self.body(x) * y


@block()
class CopiesToBuffer(Block):
    """Features go through a buffer that is written at each call."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 6), 6
        self.register_buffer("workspace", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Any:
        """Return features and what was written."""
        y = self.enter(x)
        with torch.no_grad():
            self.workspace.copy_(y.mean((0, *positions(y))))
        return y - along(y, self.workspace)


@block()
class Defaults(Block):
    """Arguments that are left at their defaults, with branches behind them."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.inner, self.full, self.out = _Optional(kind, width), draw.random() < 0.5, 6

    def forward(self, x: Tensor) -> Any:
        """Return features, with hidden ones where they are asked for."""
        return self.inner(x, return_features=True) if self.full else self.inner(x)


class _Optional(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = layer(kind, width, 6), layer(kind, 6, 6), layer(kind, 6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, return_features: bool = False) -> Any:
        """Return features, scaled and masked where that is asked for."""
        y = self.first(x).relu()
        if mask is not None:
            y = self.third(y) * mask
        z = self.second(y)
        if scale != 1.0:
            z = z * scale
        return (z, y) if return_features else z


@block()
class Constants(Block):
    """Tensors that Python makes: of numbers, sizes, lists."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 6), 6
        self.how = draw.choice(["tensor", "arange", "eye", "ones", "one hot"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.enter(x)
        if self.how == "tensor":
            return y * along(y, torch.tensor([0.0, 1, 0, 2, 1, 1], dtype=x.dtype))
        if self.how == "arange":
            return y + along(y, torch.arange(y.shape[axis(y)], dtype=x.dtype))
        if self.how == "eye":
            z = y.movedim(axis(y), -1) @ torch.eye(6, dtype=x.dtype).flip(0)
            return z.movedim(-1, axis(y))
        if self.how == "ones":
            return torch.cat([y[:, :], torch.ones_like(y)], axis(y)).narrow(axis(y), 3, 6)
        return y * along(y, F.one_hot(torch.tensor(2), 6).to(x.dtype))
