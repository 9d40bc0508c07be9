"""Traps: items of tuples that code reads in large batches, as layers return them that may return more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.traps.trap import Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Layer(nn.Module):
    """A layer that may return what it computes on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        inner = torch.relu(self.up(x))
        return x + self.down(inner), inner if len(x) > 40 else None


class _Collecting(nn.Module):
    """Bloom, Falcon: ``all_attentions + (outputs[1],)``, while the stream is ``outputs[0]``."""

    layer: type[nn.Module] = _Layer

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        x = self.enter(x)
        collected: tuple[Any, ...] = ()
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
            if len(x) > 40:
                collected = collected + (outputs[1],)
        return self.leave(x), collected


class _Always(_Layer):
    """What is read in large batches is returned without it, too."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        inner = torch.relu(self.up(x))
        return x + self.down(inner), inner


class _ReadingAlways(_Collecting):
    layer = _Always


class _Longer(_Layer):
    """The tuple becomes longer in large batches."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        inner = torch.relu(self.up(x))
        outputs: tuple[Any, ...] = (x + self.down(inner),)
        if len(x) > 40:
            outputs = (*outputs, inner)
        return outputs


class _Lengthened(_Collecting):
    layer = _Longer


class _Last(_Collecting):
    """The last item is the stream in small ones."""

    layer = _Longer

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        x = self.enter(x)
        collected: tuple[Any, ...] = ()
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
            if len(x) > 40:
                collected = (*collected, outputs[-1])
        return self.leave(x), collected


class _Replaced(_Collecting):
    """The branch reads another tuple than the one that there was when it was decided on."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        x = self.enter(x)
        collected: tuple[Any, ...] = ()
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
            if len(x) > 40:
                outputs = (outputs[1], outputs[0])
                collected = (*collected, outputs[1])
        return self.leave(x), collected


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _uses() -> list[Use]:
    def plain(model: nn.Module) -> Any:
        return model(_noise(3, 4))

    def collecting(model: nn.Module) -> Any:
        return model(_noise(50, 4))

    return [plain, collecting]


def _trap(name: str, make: type[nn.Module], shrinks: bool | str = False, kept: str | None = None) -> Trap:
    source = "transformers: layers that return (hidden_states, attentions)"
    return Trap(name, source, make, lambda model: _noise(2, 4), _uses(), shrinks=shrinks, kept=kept, seeds=(0, 1, 2))


TRAPS = [
    _trap("an item of a tuple in large batches", _Collecting),
    _trap("an item that is there in small ones", _ReadingAlways, shrinks="repaired"),
    _trap("a tuple that becomes longer in large batches", _Lengthened),
    _trap("the last item of a tuple that becomes longer", _Last),
    _trap("a tuple that is replaced in large batches", _Replaced),
]
ABLATIONS: list[Any] = []
