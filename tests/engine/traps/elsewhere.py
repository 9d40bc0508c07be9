"""Traps: layers that code which did not run calls again, and what a call leaves somewhere until it ends."""

from __future__ import annotations

import ast
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.flow import chosen_calls, paths_read, rounds
from engine.unrecorded import chosen_numbers, unreached
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.objects import MANY, of_many
from tests.engine.traps.trap import Ablation

__all__ = ["ABLATIONS", "TRAPS"]

HELD: list[Tensor] = []
"""What a call holds for a while."""

LOCAL = threading.local()


class _Encoder(nn.Module):
    """Two layers; a method returns what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def between(self, x: Tensor) -> Tensor:
        """Return what the first layer computes."""
        return torch.relu(self.first(x)) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.between(x))) + 0.5


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.leave = _Encoder(), nn.Linear(8, 3)


def _norms(h: Tensor) -> Tensor:
    return h.square().mean(1, keepdim=True)


# ---------------------------------------------------------------- layers that are called again


class _SecondView(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        if other is not None:
            return self.encode(other)
        return self.leave(self.encode(x))


class _Consistency(_Net):
    def forward(self, x: Tensor, weak: Tensor | None = None) -> Any:
        y = self.leave(self.encode(x))
        if weak is None:
            return y
        target = self.encode(weak).detach()
        return y, F.mse_loss(self.encode(x), target)


class _Features(_Net):
    def forward(self, x: Tensor) -> Any:
        if len(x) > 40:
            return self.encode(x).mean(1, keepdim=True)
        return self.leave(self.encode(x))


class _Between(_Net):
    def forward(self, x: Tensor) -> Any:
        if len(x) > 40:
            return _norms(self.encode.between(x))
        return self.leave(self.encode(x))


class _BetweenToHead(_Net):
    def forward(self, x: Tensor) -> Any:
        if len(x) > 40:
            return self.leave(self.encode.between(x))
        return self.leave(self.encode(x))


class _ByMethod(_Net):
    def encoded(self, x: Tensor) -> Any:
        return self.encode(x)

    def forward(self, x: Tensor) -> Any:
        y = self.leave(self.encoded(x))
        return y + self.encoded(x).square().mean() if len(x) > 40 else y


class _FirstLayers(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Any:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        y = self.leave(h)
        if len(x) > 40:
            z = x
            for layer in self.layers[:1]:
                z = layer(z)
            y = y + _norms(z)
        return y


class _LookedUp(_Net):
    def forward(self, x: Tensor) -> Any:
        if len(x) > 40:
            for name in ("encode",):
                x = getattr(self, name)(x)
            return x.mean(1)
        return self.leave(self.encode(x))


class _Child(_Net):
    def forward(self, x: Tensor) -> Any:
        if len(x) > 40:
            return next(iter(self.children()))(x).mean(1)
        return self.leave(self.encode(x))


class _AsBefore(_Net):
    """Calls its layers as it does elsewhere: they may lose channels."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        if other is not None:
            x = other * 2
            h = self.encode(x)
            return self.leave(h)
        h = self.encode(x)
        return self.leave(h)


# ---------------------------------------------------------------- what is held for a while


class _Attribute(_Net):
    h: Tensor | None

    def forward(self, x: Tensor) -> Any:
        self.h = self.encode(x)
        y = self.leave(self.h)
        if len(x) > 40:
            y = y + _norms(self.h)
        self.h = None
        return y


class _Part(_Net):
    """Reads a part of what it holds, which an index picks that cannot be told."""

    def forward(self, x: Tensor) -> Any:
        self.levels = {"level1": self.encode(x)}
        y = self.leave(self.levels["level1"])
        if len(x) > 40:
            y = y + sum(_norms(self.levels[f"level{i}"]) for i in (1,))
        self.levels = {}
        return y


class _ByProperty(_Net):
    _h: Tensor | None = None

    @property
    def hidden(self) -> Tensor | None:
        """What is held."""
        return self._h

    def norms(self) -> Tensor:
        """Return one number for each sample."""
        return _norms(self.hidden)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        self._h = self.encode(x)
        y = self.leave(self._h)
        if len(x) > 40:
            y = y + self.norms()
        self._h = None
        return y


class _Head(nn.Module):
    context: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(8, 3)

    def forward(self, h: Tensor) -> Any:
        y = self.leave(h)
        if len(h) > 40:
            y = y + _norms(self.context)
        return y


class _ForAPart(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = _Head()

    def forward(self, x: Tensor) -> Any:
        h = self.encode(x)
        self.head.context = h
        try:
            return self.head(h)
        finally:
            self.head.context = None


class _Global(_Net):
    def forward(self, x: Tensor) -> Any:
        HELD.append(self.encode(x))
        y = self.leave(HELD[0])
        if len(x) > 40:
            y = y + _norms(HELD[0])
        HELD.clear()
        return y


class _Local(_Net):
    def forward(self, x: Tensor) -> Any:
        LOCAL.h = self.encode(x)
        y = self.leave(LOCAL.h)
        if len(x) > 40:
            y = y + _norms(LOCAL.h)
        del LOCAL.h
        return y


# ---------------------------------------------------------------- operands, and sizes that were read before


class _Operand(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x); y = self.leave(h); return y + (len(x) > 40 and _norms(h))  # fmt: skip  # noqa: E702


class _LastOperand(Net):
    def forward(self, x: Tensor, aux: bool = False) -> Any:
        h = self.features(x)
        return self.leave(h) + (aux and len(x) > 40 and _norms(h))


class _Temperature(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y, temperature = self.leave(h), math.sqrt(h.shape[1])
        return y / temperature if len(x) > 40 else y


class _Dim(Net):
    dim = 1

    def scaled(self, y: Tensor) -> Tensor:
        return y / self.dim if len(y) > 40 else y

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        self.dim = h.shape[1]
        return self.scaled(self.leave(h))


# ---------------------------------------------------------------- numbers that pick, and rounds that end


class _Changed(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        levels, i = [h, self.leave(h)], 1
        if len(x) > 40:
            i -= 1
        return levels[i].square().mean(1)


class _ChangedText(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        levels, key = {"hidden": h, "out": self.leave(h)}, "out"
        if len(x) > 40:
            key = key.replace("out", "hidden")
        return levels[key].square().mean(1)


class _LastRound(Net):
    def forward(self, x: Tensor) -> Any:
        last = 1
        if len(x) > 40:
            last = 0
        for i, layer in enumerate((self.features, self.leave)):
            x = layer(x)
            if i == last:
                return x.square().mean(1)
        return x


class _Asked(Net):
    def forward(self, x: Tensor) -> Any:
        levels, wanted = [], [1]
        if len(x) > 40:
            wanted.append(0)
        for i, layer in enumerate((self.features, self.leave)):
            x = layer(x)
            if i in wanted:
                levels.append(x.square().mean(1))
        return levels


class _Compared(Net):
    def forward(self, x: Tensor) -> Any:
        for i, layer in enumerate((self.features, self.leave)):
            x = layer(x)
            if i == (0 if len(x) > 40 else 1):
                break
        return x.square().mean(1)


TRAPS = [
    of_many("a second view through the same layers", "CLIP, SimSiam: if x2 is not None: return self.encoder(x2)",
          _SecondView, called(noise(3), other=noise(5))),
    of_many("a consistency loss on demand", "FixMatch: F.mse_loss(self.encoder(x), self.encoder(weak).detach())",
          _Consistency, called(noise(3), weak=noise(3) + 1)),
    of_many("features of a large batch alone", "return self.encoder(x).mean(1)", _Features),
    of_many("a level between the layers of a part", "self.encoder.forward_features(x)", _Between),
    of_many("a level between the layers, to the head", "self.head(self.encoder.forward_features(x))", _BetweenToHead),
    of_many("what a method computes, once more", "self.extract(x).pow(2).mean()", _ByMethod),
    of_many("the first layers once more", "for layer in self.layers[:1]: z = layer(z)", _FirstLayers),
    of_many("a layer that is looked up by its name", "getattr(self, f'layer{i}')(x)", _LookedUp),
    of_many("the first of the children", "list(self.children())[0](x)", _Child),
    of_many("layers that are called as before", "return self.head(self.encoder(other))", _AsBefore,
          called(noise(3), other=noise(5)), shrinks=True),
    of_many("a tensor that an attribute holds for a while", "self.feats = h; …; self.feats = None", _Attribute),
    of_many("an item that an attribute holds for a while", "self.features[f'p{level}']", _Part),
    of_many("a tensor that a method reads by a property", "self.aux_loss(), with self.hidden", _ByProperty),
    of_many("a tensor that a part holds for a while", "self.head.context = h; try: … finally: …", _ForAPart),
    of_many("a tensor in a list of the file for a while", "CACHE.append(h); …; CACHE.clear()", _Global),
    of_many("a tensor that a thread holds for a while", "STATE = threading.local()", _Local),
    of_many("a term behind an operator", "loss = y + (self.training and aux)", _Operand),
    of_many("a term behind two operators", "y + (aux and len(x) > n and h.norm())", _LastOperand,
          called(noise(MANY), aux=True)),
    of_many("an index that is changed", "i -= 1; return features[i]", _Changed),
    of_many("a key that is changed", "key = key.replace('_flip', '')", _ChangedText),
    of_many("the last of some rounds", "if i == self.num_feature_levels: return x", _LastRound),
    of_many("levels that are asked for", "if i in out_indices: outs.append(x)", _Asked),
    of_many("a side of a comparison", "if i == (a if training else b): break", _Compared),
    of_many("a temperature from a width", "attn / math.sqrt(q.shape[-1])", _Temperature),
    of_many("a width in an attribute for a while", "self.dim = h.shape[1]; …; y / self.dim", _Dim),
]  # fmt: skip


def _no_changes(patch: pytest.MonkeyPatch) -> None:
    plain = chosen_numbers._is_plain
    patch.setattr(chosen_numbers, "_is_plain", lambda value, code, own="": plain(value, code))


ABLATIONS = [
    Ablation("a number that is changed is another one", _no_changes, "a key that is changed"),
    Ablation(
        "numbers that are compared in loops end other rounds",
        lambda patch: patch.setattr(chosen_calls, "_LOOPS", (ast.Lambda,)),
        "levels that are asked for",
    ),
    Ablation(
        "results of layers that code which did not run calls are used there",
        lambda patch: patch.setattr(unreached, "results_used_otherwise", lambda branch, modules, dataflow: iter(())),
        "a second view through the same layers",
    ),
    Ablation(
        "what attributes and globals hold for a while is read",
        lambda patch: patch.setattr(rounds, "state_read", lambda branch, variables, space: iter(())),
        "a tensor that an attribute holds for a while",
    ),
    Ablation(
        "sizes that were read before are divided by",
        lambda patch: patch.setattr(paths_read, "_numbers", lambda branch: ()),
        "a width in an attribute for a while",
    ),
]
