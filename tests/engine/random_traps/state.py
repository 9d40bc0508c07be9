"""Blocks that leave something behind, or find what code outside the model has set."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, along, axis, block, layer, positions


@block()
class RunningCentre(Block):
    """A running mean in a buffer, moved in train mode or in both."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.register_buffer("centre", torch.zeros(width))
        self.always = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return centred features."""
        y = x - along(x, self.centre)
        if self.training or self.always:
            self.centre.mul_(0.9).add_(x.detach().mean((0, *positions(x))), alpha=0.1)
        return y


@block()
class Observer(Block):
    """Clamps to the range of everything it has seen."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.register_buffer("lowest", torch.tensor(-1.0))
        self.register_buffer("highest", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Any:
        """Return features within the range."""
        if self.training:
            self.lowest = torch.minimum(self.lowest, x.detach().min())
            self.highest = torch.maximum(self.highest, x.detach().max())
        return torch.max(torch.min(x, self.highest), self.lowest)

    def later(self) -> None:
        """Calibrate."""
        self.lowest.fill_(-0.4)
        self.highest.fill_(0.3)


@block()
class Queue(Block):
    """A queue of keys with a pointer."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.key = nn.Linear(width, 4)
        self.register_buffer("keys", torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        """Return the input, and similarities."""
        q = F.normalize(self.key(x.mean(positions(x))), dim=1, eps=1e-3)
        logits = q @ self.keys.clone()
        at = int(self.pointer)
        with torch.no_grad():
            self.keys[:, at] = q[0]
            self.pointer[0] = (at + 1) % 6
        return x * 1.0, logits


@block()
class Previous(Block):
    """What the last call has seen is added, from an attribute, a list, a dictionary or a deque."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.where = draw.choice(["attribute", "dict", "list", "deque"])
        self.memory: Tensor | None = None
        self.named: dict[str, Tensor] = {}
        self.listed: list[Tensor] = []
        self.line: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Any:
        """Return the input and the mean of earlier ones."""
        mean = x.detach().mean((0, *positions(x)))
        if self.where == "attribute":
            before = mean if self.memory is None else self.memory
            self.memory = 0.5 * before + 0.5 * mean
        elif self.where == "dict":
            before = self.named.get("mean", mean)
            self.named["mean"] = mean
        elif self.where == "list":
            self.listed.append(mean)
            before = torch.stack(self.listed[-2:]).mean(0)
        else:
            before = self.line[0] if self.line else mean
            self.line.append(mean)
        return x + along(x, before)


@block()
class LateLayer(Block):
    """A layer from the second call on."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.warm, self.last = layer(kind, width, width), None

    def forward(self, x: Tensor) -> Any:
        """Return features, with those of the last call."""
        y = x if self.last is None else x + self.warm(self.last).mean((0, *positions(x)), keepdim=True)
        self.last = x.detach()
        return y


@block()
class Calls(Block):
    """Counts calls in a number, or in a buffer."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.number, self.buffered = 0, draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return the input, less of it at each call."""
        if self.buffered:
            self.calls += 1
            return x / (1 + self.calls)
        self.number += 1
        return x / (1 + self.number)


@block()
class ActNorm(Block):
    """Initialised by the first batch."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.loc, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Any:
        """Return normalised features."""
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean((0, *positions(x))))
                self.scale.copy_(1 / (x.transpose(0, axis(x)).flatten(1).std(1) + 1e-3))
            self.initialized.fill_(1)
        return along(x, self.scale) * (x + along(x, self.loc))


@block()
class BufferGate(Block):
    """A branch behind a buffer that is zero at first."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.branch = layer(kind, width, width)
        self.register_buffer("gate", torch.zeros(draw.choice([(), (1,), (width,)])), persistent=draw.random() < 0.5)

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        gate = along(x, self.gate) if self.gate.numel() > 1 else self.gate
        return x + gate * self.branch(x).relu()

    def later(self) -> None:
        """Open."""
        self.gate.fill_(0.7)


@block()
class NumberGate(Block):
    """A branch behind a number that somebody sets later."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.side, self.alpha = layer(kind, width, width), draw.choice([0.0, 1.0])
        self.skips = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        if self.skips and self.alpha == 0.0:
            return x
        return x + self.alpha * self.side(x).relu()

    def set_alpha(self, value: float) -> None:
        """Set the gate."""
        self.alpha = value

    def later(self) -> None:
        """Open half."""
        self.set_alpha(0.5)


@block()
class FlagGate(Block):
    """A branch behind a flag that a method sets."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.extra, self.enabled = layer(kind, width, width), draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        return x + self.extra(x).tanh() if self.enabled else x

    def later(self) -> None:
        """Switch."""
        self.enabled = not self.enabled


@block()
class Temperature(Block):
    """Attention over channels with a temperature that a schedule moves."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.choose, self.temperature = nn.Linear(width, width), 4.0

    def forward(self, x: Tensor) -> Any:
        """Return weighted channels."""
        weights = (self.choose(x.mean(positions(x))) / self.temperature).softmax(-1)
        return x * (weights[:, :, None, None] if x.ndim == 4 else weights[:, None])

    def later(self) -> None:
        """Lower it."""
        self.temperature = self.temperature - 1


@block()
class CachedBySize(Block):
    """Positions, made once for each size."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.enter, self.out = layer(kind, width, 6), 6
        self.cached: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        """Return features with positions."""
        size = x.shape[2:] if x.ndim == 4 else x.shape[1:2]
        if tuple(size) not in self.cached:
            ramp = torch.linspace(0, 1, size.numel(), dtype=x.dtype).view(size)
            self.cached[tuple(size)] = ramp if x.ndim == 4 else ramp[:, None]
        return self.enter(x) + self.cached[tuple(size)]


@block()
class GrowingTable(Block):
    """A table of positions that grows on demand."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.table = self._make(4)

    def _make(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.float64).mul(0.7).sin()

    def forward(self, x: Tensor) -> Any:
        """Return features with positions."""
        n = x.shape[-1] if x.ndim == 4 else x.shape[1]
        if n > len(self.table):
            self.table = self._make(n)
        return x + (self.table[:n] if x.ndim == 4 else self.table[:n, None])


@block("tokens")
class KeyValues(Block):
    """Attends to earlier calls as well."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.query, self.key, self.value, self.out = nn.Linear(width, 6), nn.Linear(width, 6), nn.Linear(width, 6), 6
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        """Return attended values."""
        k, v = self.key(x), self.value(x)
        self.keys.append(k.detach().mean(0, keepdim=True))
        self.values.append(v.detach().mean(0, keepdim=True))
        ks = torch.cat([k, *(t.expand(len(x), -1, -1) for t in self.keys)], 1)
        vs = torch.cat([v, *(t.expand(len(x), -1, -1) for t in self.values)], 1)
        return torch.softmax(self.query(x) @ ks.mT, -1) @ vs


@block("tokens")
class Carried(Block):
    """A state on the module from which the next call goes on."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.cell, self.hidden, self.out = nn.GRUCell(width, 5), None, 5

    def forward(self, x: Tensor) -> Any:
        """Return all states."""
        state = x.new_zeros(1, 5) if self.hidden is None else self.hidden
        state, states = state.expand(x.shape[0], 5), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        self.hidden = state.detach().mean(0, keepdim=True)
        return torch.stack(states, 1)


@block()
class CachedWeight(Block):
    """A standardised weight is kept in eval mode."""

    derived = ("cached_weight",)

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.base, self.out, self.cached_weight = nn.Linear(width, 6), 6, None

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        if self.training or self.cached_weight is None:
            w = self.base.weight
            self.cached_weight = ((w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 0.1)).detach()
        return F.linear(x.movedim(axis(x), -1), self.cached_weight, self.base.bias).movedim(-1, axis(x))
