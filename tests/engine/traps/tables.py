"""Traps: tables in buffers, such as those of positions, that masks zero like parameters, or that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.alternatives import mutable_state
from engine.observations.dataflow import Dataflow
from engine.unrecorded import unreached
from tests.engine.exactness import Masks, layers
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

_TUTORIAL = "pytorch.org, Language Modeling with nn.Transformer"


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class _Stream(nn.Module):
    """A residual stream behind a table; how they are combined is the trap's."""

    def __init__(self, combine: Callable[[Any, Tensor], Tensor], *shape: int, persistent: bool = True) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.head, self.combine = nn.LayerNorm(8), nn.Linear(8, 3), combine
        self.register_buffer("table", _noise(*shape or (1, 16, 8), seed=2), persistent=persistent)
        self.register_buffer("gate", (_noise(16, 8, seed=3) > 0).double())
        self.register_buffer("memory", torch.zeros(1, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.combine(self, self.embed(x))
        return self.head(self.norm(y + self.down(self.up(y).relu())))  # type: ignore[no-any-return]


def _slice(net: Any, y: Tensor) -> Tensor:
    return y + net.table[:, : y.size(1)]


def _beside_fixed(net: Any, y: Tensor) -> Tensor:
    other = net.table[:, :1] * torch.linspace(0.5, 1.5, 8, dtype=y.dtype)
    return y + net.table[:, : y.size(1)] + other.sum(-1, keepdim=True)


def _normalised(net: Any, y: Tensor) -> Tensor:
    return y + F.normalize(net.table[:, : y.size(1)], dim=-1)


def _scaled(net: Any, y: Tensor) -> Tensor:
    return y * net.table[:, : y.size(1)]


def _gated(net: Any, y: Tensor) -> Tensor:
    return y * net.gate[: y.size(1)]


def _remembered(net: Any, y: Tensor) -> Tensor:
    return y + net.memory[:, : y.size(1)]


def _by_position(net: Any, y: Tensor) -> Tensor:
    return y * net.table[0, : y.size(1), :1]


def _summed(net: Any, y: Tensor) -> Tensor:
    return y + net.table[:, : y.size(1)] + net.table.mean()


def _by_number(net: Any, y: Tensor) -> Tensor:
    return (y + net.table[:, : y.size(1)]) * float(net.table[0, 0, 0])


def _by_width(net: Any, y: Tensor) -> Tensor:
    table = net.table[:, : y.size(1)]
    return y * table.shape[-1] ** 0.5 + table


def _divided(net: Any, y: Tensor) -> Tensor:
    table = net.table[:, : y.size(1)]
    return (y + table) / table


def _by_data(net: Any, y: Tensor) -> Tensor:
    return y + net.table[0][(y.sum(-1) > 0).long()]


def _square(net: Any, y: Tensor) -> Tensor:
    return y + net.table[: y.size(1)]


def _longer(net: Any, y: Tensor) -> Tensor:
    if y.size(1) > 9:
        return y + net.table.sum(-1)[:, : y.size(1), None]
    return y + net.table[:, : y.size(1)]


class _Passed(_Stream):
    """Positions that the caller may pass."""

    def __init__(self) -> None:
        super().__init__(_slice)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = self.table[:, : x.size(1)]
        y = self.embed(x) + positions
        return self.head(self.norm(y + self.down(self.up(y).relu())))  # type: ignore[no-any-return]


class _Output(_Stream):
    """Returns the positions as well."""

    def __init__(self) -> None:
        super().__init__(_slice)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.table[:, : x.size(1)]  # type: ignore[return-value]


class _Moved(_Stream):
    """Positions that train mode moves."""

    def __init__(self) -> None:
        super().__init__(lambda net, y: y + net.moved[:, : y.size(1)])
        self.register_buffer("moved", _noise(1, 16, 8, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.moved[:, : x.size(1)] += 0.1  # type: ignore[index, operator]
        return super().forward(x)


class _Movable(_Stream):
    """Positions that a method moves."""

    def __init__(self) -> None:
        super().__init__(lambda net, y: y + net.movable[:, : y.size(1)])
        self.register_buffer("movable", _noise(1, 16, 8, seed=2))

    def move(self) -> None:
        """Move all positions."""
        self.movable.add_(0.3)  # type: ignore[operator, union-attr]


class _Writer(nn.Module):
    """Writes to a table of another module by way of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = _Stream(lambda net, y: y + net.outside[:, : y.size(1)])
        self.stream.register_buffer("outside", _noise(1, 16, 8, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.stream(x)
        if self.training:
            self.stream.get_buffer("outside").mul_(1.5)
        return out  # type: ignore[no-any-return]


class _Shared(nn.Module):
    """Two streams of different layers with one table."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.first, self.second = _Stream(_slice), _Stream(_slice)
        if alone:
            self.second.table = self.first.table
        else:
            self.second.register_buffer("table", self.first.table[:, 2:])

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


class _Rotary(nn.Module):
    """Attention with rotary positions, from tables of cosines and sines."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(5, 3 * 16), nn.Linear(16, 6), nn.Linear(6, 2)
        angles = torch.arange(16.0).double()[:, None] * 0.7 ** torch.arange(4.0).double()
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.interleaved, self.heads = interleaved, 2

    def _turn(self, x: Tensor) -> Tensor:
        if self.interleaved:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat([-second, first], -1)
        n = x.size(2)
        return x * self.cos[:n] + turned * self.sin[:n]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = self._turn(q) @ self._turn(k).mT
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head(self.out(y).relu())  # type: ignore[no-any-return]


def _example(model: nn.Module) -> Tensor:
    return _noise(2, 7, 5)


_USES = (once(2, 7, 5), once(3, 9, 5, seed=4))


def _trains(model: nn.Module) -> Any:
    """Run a step in train mode, and the model after it."""
    model.train()
    with torch.no_grad():
        trained = model(_noise(2, 7, 5, seed=6))
    return trained, once(2, 7, 5)(model)


def _after(change: Callable[[nn.Module], Any]) -> Use:
    """Return a use that changes the network first, as code outside would."""

    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            change(model)
        return once(2, 7, 5)(model)

    return use


def _passing(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(_noise(2, 7, 5), positions=_noise(1, 7, 8, seed=5))


def _masks(model: nn.Module, seed: int) -> Masks:
    """Mask the same channels of all layers that write to a stream (others in a second one), or those of a head."""
    masks: Masks = {}
    for name, layer in layers(model):
        weight = layer.get_parameter("weight")
        kept = torch.arange(len(weight)) % 2 == (seed != name.startswith("second"))
        if len(weight) == 48:
            kept = torch.arange(48) // 8 % 2 == seed
        if not name.endswith("head"):
            masks[name] = {"weight": kept[:, None].expand(weight.shape)}
    return masks


def _trap(name: str, make: Callable[[], nn.Module], source: str = _TUTORIAL, **rest: Any) -> Trap:
    return Trap(name, source, make, _example, **{"uses": _USES, "shrinks": True, "masks": _masks, **rest})


TRAPS = [
    _trap("a table of positions", lambda: _Stream(_slice)),
    _trap("a table of positions, once beside a fixed size", lambda: _Stream(_beside_fixed)),
    _trap("a table of positions that is normalised", lambda: _Stream(_normalised), "GTrXL"),
    _trap("a table that scales", lambda: _Stream(_scaled), "RWKV, time decay"),
    _trap(
        "a table of zeros and ones that is opened later",
        lambda: _Stream(_gated),
        "stochastic gates in a buffer",
        uses=(*_USES, _after(lambda model: model.gate.fill_(0.7))),  # type: ignore[union-attr, operator]
        shrinks=False,
    ),
    _trap(
        "a table of zeros that is filled later",
        lambda: _Stream(_remembered),
        "memory in a buffer",
        uses=(*_USES, _after(lambda model: model.memory.fill_(0.7))),  # type: ignore[union-attr, operator]
    ),
    _trap("a table of positions alone", lambda: _Stream(_by_position), "ALiBi-like decay"),
    _trap("a table that is not saved", lambda: _Stream(_slice, persistent=False), "timm, persistent=False"),
    _trap("a table whose mean is added", lambda: _Stream(_summed)),
    _trap("a table of which a number is read", lambda: _Stream(_by_number)),
    _trap("a table whose width scales", lambda: _Stream(_by_width), kept="does not follow"),
    _trap("a table that also divides", lambda: _Stream(_divided)),
    _trap("a table whose rows the data pick", lambda: _Stream(_by_data), "learned indices"),
    _trap("a table of as many positions as channels", lambda: _Stream(_square, 16, 8), uses=(*_USES, once(1, 8, 5))),
    _trap("a table that is read otherwise for long inputs", lambda: _Stream(_longer), uses=(*_USES, once(1, 12, 5))),
    _trap("positions that the caller may pass", _Passed, uses=(*_USES, _passing)),
    _trap("positions that are an output, too", _Output),
    _trap("positions that train mode moves", _Moved, trains=(_trains,), uses=(*_USES, _trains)),
    _trap(
        "positions that a method moves",
        _Movable,
        uses=(*_USES, _after(lambda model: model.move())),  # type: ignore[operator]
    ),
    _trap("positions that another module moves", _Writer, trains=(_trains,), uses=(*_USES, _trains)),
    _trap("positions that two modules share", lambda: _Shared(alone=True)),
    _trap("positions of which another buffer is a part", lambda: _Shared(alone=False)),
    _trap(
        "positions that somebody scales later",
        lambda: _Stream(_slice),
        uses=(*_USES, _after(lambda model: model.table.mul_(2))),  # type: ignore[union-attr, operator]
    ),
    _trap("rotary tables of halves", lambda: _Rotary(interleaved=False), "RoFormer, as in GPT-NeoX"),
    _trap("rotary tables of pairs", lambda: _Rotary(interleaved=True), "RoFormer"),
]


def _with_all_constant(*args: Any) -> Dataflow:
    return Dataflow(*args[:3])


ABLATIONS = [
    Ablation(
        "a table of zeros alone is not masked",
        lambda patch: patch.setattr(mutable_state, "_is_gate", lambda table: False),
        "a table of zeros that is filled later",
        repaired=True,
    ),
    Ablation(
        "a table that code writes to is not masked",
        lambda patch: patch.setattr(mutable_state.MutableState, "_may_change", lambda self, module, name: False),
        "positions that a method moves",
        repaired=True,
    ),
    Ablation(
        "a table that shares its memory is not masked",
        lambda patch: patch.setattr(mutable_state, "_shared", lambda model, tables: set()),
        "positions of which another buffer is a part",
        repaired=True,
    ),
    Ablation(
        "what is computed from tables in the place of an argument stays",
        lambda patch: patch.setattr(unreached, "Dataflow", _with_all_constant),
        "positions that the caller may pass",
        repaired=True,
    ),
]
