"""Traps: code whose text Python does not keep, compiled from strings as `exec` and an interpreter do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.source.unread_code import UnreadFunction
from engine.unrecorded import unreached, unread_functions
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

TEXT = """
import torch
from torch import nn

DOUBLED = False

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.late, self.leave = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.shortcut = None
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.kind = "relu"

    def forward(self, x{arguments}):
        y = self.enter(x).relu()
        for layer in self.layers:
            y = layer(y).relu()
        {body}
        return self.leave(self.late(y))
"""

LAYERED = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)])

    def forward(self, x, embed=None):
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if embed is not None and place in embed:
                return x
        return x
"""


def _net(body: str, arguments: str = "", text: str = TEXT) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        space: dict[str, Any] = {"__name__": __name__}
        exec(text.format(body=body, arguments=arguments), space)
        net: nn.Module = space["Net"]()
        return net

    return make


def _called(*args: Any) -> Use:
    def use(model: nn.Module) -> Any:
        noise = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(noise, *args)

    return use


def _doubled(model: nn.Module) -> Any:
    space = type(model).forward.__globals__
    space["DOUBLED"] = True
    try:
        return _called()(model)
    finally:
        space["DOUBLED"] = False


def _other_kind(model: nn.Module) -> Any:
    model.kind = "sigmoid"
    return _called()(model)


def _functions(model: nn.Module) -> Any:
    return torch.randn(4, 8, dtype=torch.float64), torch.relu


def _example(model: nn.Module) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64)


def _trap(name: str, source: str, make: Callable[[], nn.Module], *uses: Use, **options: Any) -> Trap:
    options = {"example": _example, "kept": "whose text Python does not keep", **options}
    return Trap(name, source, make, uses=[once(6, 8), *uses], **options)


EXEC = "collections.namedtuple, dataclasses, remote code: classes compiled from strings"
TYPED = "a class typed into the interpreter, or read from a pipe"

TRAPS = [
    _trap("typed: an argument left out", TYPED,
          _net("y = y if shift is None else y + shift", ", shift=None"), _called(1.0)),
    _trap("typed: an early return", TYPED, _net("if first: return y", ", first=False"), _called(True), kept=None),
    _trap("typed: a return between layers of a list", TYPED, _net("", text=LAYERED), _called([1])),
    _trap("typed: a layer that is skipped", TYPED, _net("if x.is_contiguous(): y = self.late(y + 1)"), _called()),
    _trap("typed: an item by a flag", EXEC, _net("y = [torch.relu, torch.sigmoid][DOUBLED](y)"), _doubled),
    _trap("typed: a factor by a flag", EXEC, _net("y = y + DOUBLED"), _doubled),
    _trap("typed: a function by name", EXEC, _net("y = getattr(torch, self.kind)(y)"), _other_kind),
    _trap("typed: a table by name", EXEC,
          _net("y = {'relu': torch.relu}.get(self.kind, torch.sigmoid)(y)"), _other_kind),
    _trap(
        "typed: a function of the caller's", TYPED, _net("y = act(y)", ", act=torch.relu"), _called(torch.sigmoid),
        example=_functions,
    ),
    _trap(
        "typed: a side that the model rejects alone", TYPED,
        _net("y = y + 1.0 + shift if on else y", ", on=False, shift=None"), _called(True, 0.5),
    ),
    _trap("typed: a shortcut that is never there", TYPED, _net("if self.shortcut is not None: y = self.shortcut(x)"),
          kept=None, shrinks="repaired"),
    _trap("typed: sizes that are asked for", TYPED, _net("assert x.ndim == 2 and x.shape[1] == 8, x.shape"),
          kept=None, shrinks="repaired"),
]  # fmt: skip


def _nothing_assumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "assume_nothing_of_unread_functions", lambda *args: None)


def _both_ways(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnreadFunction, "one_way", lambda self: iter(()))


def _nothing_chosen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unread_functions, "chooses_by_value", lambda code, space: False)


ABLATIONS = [
    Ablation("functions without text may do anything", _nothing_assumed, "typed: an argument left out", True),
    Ablation("a jump that went one way has another side", _both_ways, "typed: an argument left out", True),
    Ablation("what is looked up by a value may be something else", _nothing_chosen, "typed: an item by a flag", True),
]
