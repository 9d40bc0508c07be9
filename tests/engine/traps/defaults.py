"""Traps: what code puts in the place of arguments that the example leaves out, in each way that Python has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.flow import forward_arguments, omitted_arguments
from engine.flow.argument_flow import PassedArguments
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


def _noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Cell(nn.Module):
    """Mixes features with a state, which it begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, z: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the features, gated by the state."""
        state = torch.zeros(8, dtype=z.dtype) if hx is None else hx
        return torch.sigmoid(self.body(state)) * z


class Net(nn.Module):
    """A stem, a layer for a state, a cell, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.cell = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), Cell()

    def gated(self, z: Tensor, state: Tensor) -> Tensor:
        """Return logits of the features, gated by a state."""
        return self.head(torch.sigmoid(self.body(state)) * z)  # type: ignore[no-any-return]

    def empty(self, z: Tensor) -> Tensor:
        """Return a state."""
        return torch.zeros(8, dtype=z.dtype)


def _typed(self: Any, x: Tensor, h: Tensor | None = None) -> Any:
    z = self.stem(x).relu()
    state: Tensor = self.empty(z) if h is None else h
    return self.gated(z, state)


def _in_expression(self: Any, x: Tensor, h: Tensor | None = None) -> Any:
    z = self.stem(x).relu()
    return self.gated(z, state := self.empty(z) if h is None else h) + state.sum()


def _pair(self: Any, x: Tensor, h: Any = None) -> Any:
    z = self.stem(x).relu()
    first, second = (self.empty(z), self.empty(z)) if h is None else h
    return self.gated(z, first) + self.gated(z, second)


def _pair_in_place(self: Any, x: Tensor, h: Any = None) -> Any:
    z = self.stem(x).relu()
    if h is None:
        h = (self.empty(z), self.empty(z))
    first, second = h
    return self.gated(z, first) + self.gated(z, second)


def _in_a_loop(self: Any, x: Tensor, h: Any = None) -> Any:
    z = self.stem(x).relu()
    outputs = []
    for n in range(2):
        state = self.empty(z) if h is None else h[n]
        outputs.append(self.gated(z, state) * (n + 1))
    return sum(outputs)


def _in_a_table(self: Any, x: Tensor, h: Any = None) -> Any:
    z = self.stem(x).relu()
    cache = {}
    cache["h"] = self.empty(z) if h is None else h
    return self.gated(z, cache["h"])


def _elsewhere(self: Any, x: Tensor, h: Any = None) -> Any:
    return self.head(self.cell(self.stem(x).relu(), h))


def _made_of_zeros(self: Any, x: Tensor, h: Any = None) -> Any:
    z = self.stem(x).relu()
    if h is None:
        h = torch.cat([torch.zeros(4, dtype=z.dtype), torch.zeros(4, dtype=z.dtype)])
    return self.gated(z, h)


def _call(**kwargs: Any) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(_noise(4, 5, 6), **kwargs)

    return use


def _trap(name: str, source: str, forward: Callable[..., Any], state: Any) -> Trap:
    example = torch.zeros(2, 5, 6, dtype=torch.float64)
    make = lambda: type("Net", (Net,), {"forward": forward, "__module__": __name__})()  # noqa: E731
    return Trap(
        name=name, source=source, make=make, example=lambda _: example, uses=[_call(), _call(h=state)], shrinks=True,
    )  # fmt: skip


ONE, TWO = _noise(8), (_noise(8), _noise(8, seed=6))

TRAPS = [
    _trap("a state in a variable with a type", "typed cells: state: Tensor = zeros if h is None else h", _typed, ONE),
    _trap("a state in an expression", "f(state := zeros if h is None else h)", _in_expression, ONE),
    _trap("a pair of states", "LSTM cells: h, c = (zeros, zeros) if state is None else state", _pair, TWO),
    _trap("a pair of states in the argument", "torch.nn.LSTM: if hx is None: hx = (zeros, zeros)", _pair_in_place, TWO),
    _trap("a state per layer", "stacked cells: h = zeros if hidden is None else hidden[n]", _in_a_loop, TWO),
    _trap("a state in a table", "caches: cache['h'] = zeros if h is None else h", _in_a_table, ONE),
    _trap("a state of a part under another name", "self.cell(x, hidden) -> forward(x, hx=None)", _elsewhere, ONE),
    _trap("a state put together", "memories: torch.cat of zeros", _made_of_zeros, ONE),
]


def _only_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omitted_arguments, "_variables_read_for", lambda tree: ())


def _not_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_arguments, "passed_arguments", lambda *args: PassedArguments())


ABLATIONS = [
    Ablation("variables in place of arguments", _only_the_argument, "a state in a variable with a type"),
    Ablation("arguments of parts", _not_under_another_name, "a state of a part under another name"),
]
