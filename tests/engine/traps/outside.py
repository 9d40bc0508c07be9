"""Traps: flags and numbers outside of the model that pick what runs, set once the network is compacted."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives.outer_values import OuterValues
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

FAST = False
KIND, LEVEL, SHARE = "slow", 0, 0.0
OPTIONS = {"fast": False}
SETTINGS = SimpleNamespace(fast=False)
STATE = [False]
LOCAL = threading.local()
LOCAL.fast = False
CONTEXT: contextvars.ContextVar[bool] = contextvars.ContextVar("fast", default=False)


class Defaults:
    """Options of a class."""

    fast = False


def set_kind(kind: str) -> None:
    """Pick a kind of layer."""
    global KIND
    KIND = kind


def set_level(level: int) -> None:
    """Pick a level."""
    global LEVEL
    LEVEL = level


def _is_fast() -> bool:
    return STATE[0]


class _Picks(nn.Module):
    """One of two layers runs, by something outside.

    Args:
        choose: returns features, of the network and the hidden features.
    """

    def __init__(self, choose: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.choose, self.head = nn.Linear(5, 6), choose, nn.Linear(8, 3)
        self.usual, self.rare, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.options = SimpleNamespace(fast=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.choose(self, self.stem(x).relu()))

    def accelerate(self, fast: bool) -> None:
        """Pick the other layer."""
        self.options.fast = fast


def _by_index(net: Any, h: Tensor) -> Tensor:
    return [net.usual, net.rare][int(FAST)](h)


def _by_loop(net: Any, h: Tensor) -> Tensor:
    for layer in (net.rare, net.usual):
        y = layer(h)
        if FAST:
            break
    return y.relu()


def _by_table(net: Any, h: Tensor) -> Tensor:
    return {"slow": net.usual, "fast": net.rare, "both": net.last}[KIND](h)


def _by_text(net: Any, h: Tensor) -> Tensor:
    return getattr(net, "usual" if KIND == "slow" else "rare")(h)


def _by_level(net: Any, h: Tensor) -> Tensor:
    layers = [net.rare if LEVEL > 4 else net.usual, net.last]
    return layers[0](h)


def _by_item(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(OPTIONS["fast"])](h)


def _by_get(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(OPTIONS.get("fast", False))](h)


def _by_namespace(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(SETTINGS.fast)](h)


def _by_class(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(Defaults.fast)](h)


def _by_function(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(_is_fast())](h)


def _by_thread(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(LOCAL.fast)](h)


def _by_context(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(CONTEXT.get())](h)


def _by_import(net: Any, h: Tensor) -> Tensor:
    from tests.engine.traps import outside

    return (net.usual, net.rare)[int(outside.FAST)](h)


def _by_environment(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(os.environ.get("TRAP_FAST", "0"))](h)


def _by_presence(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int("TRAP_FAST" in os.environ)](h)


def _by_getenv(net: Any, h: Tensor) -> Tensor:
    return getattr(net, os.getenv("TRAP_FAST", "usual"))(h)


def _by_own_options(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(net.options.fast)](h)


def _by_two(net: Any, h: Tensor) -> Tensor:
    return (net.usual, net.rare)[int(FAST and OPTIONS["fast"])](h)


def _in_turn(net: Any, h: Tensor) -> Tensor:
    if FAST:
        return (net.last, net.rare)[int(SETTINGS.fast)](h)
    return net.usual(h)


def _gated(net: Any, h: Tensor) -> Tensor:
    return torch.where(h.new_tensor(SHARE) > 0, net.rare(h) * SHARE + net.usual(h), net.usual(h))


class _Trains(_Picks):
    """A flag counts in train mode only."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        if self.training:
            h = h + 0
            return self.head((self.usual, self.rare)[int(FAST)](h))
        return self.head(self.usual(h))


def _set(table: Any, key: Any, *values: Any, train: bool = False) -> Use:
    """Return a use that calls the network while a table holds each of some values; None stands for none."""

    def use(model: nn.Module) -> Any:
        results = []
        for value in values:
            before = table.get(key) if hasattr(table, "get") else table[key]
            table[key] = value
            try:
                results.append(model.train()(_NOISE).detach() if train else once(4, 5)(model))
            finally:
                if before is None:
                    del table[key]
                else:
                    table[key] = before
        return results

    return use


def _in_context(model: nn.Module) -> Any:
    token = CONTEXT.set(True)
    try:
        return once(4, 5)(model)
    finally:
        CONTEXT.reset(token)


def _on_class(model: nn.Module) -> Any:
    Defaults.fast = True
    try:
        return once(4, 5)(model)
    finally:
        Defaults.fast = False


def _own(model: Any) -> Any:
    model.accelerate(True)
    try:
        return once(4, 5)(model)
    finally:
        model.accelerate(False)


def _everything(model: nn.Module) -> Any:
    OPTIONS["fast"] = SETTINGS.fast = True
    try:
        return _set(globals(), "FAST", True)(model)
    finally:
        OPTIONS["fast"] = SETTINGS.fast = False


_NOISE = torch.randn(6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _trap(name: str, source: str, choose: Callable[[Any, Tensor], Tensor], *uses: Use, **options: Any) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=options.pop("make", lambda: _Picks(choose)),
        example=lambda model: torch.zeros(2, 5, dtype=torch.float64),
        uses=[once(4, 5), *uses],
        **{"shrinks": True, **options},
    )


_FLAG = _set(globals(), "FAST", True)
TRAPS = [
    _trap("an item of a list, by a global", "layers[int(FAST)]", _by_index, _FLAG),
    _trap("a loop that a global ends", "for layer in layers: ... if FAST: break", _by_loop, _FLAG),
    _trap("a table by a global text", "fairseq: options set by a function", _by_table, _set(globals(), "KIND", "fast")),
    _trap(
        "a name by a global text",
        "getattr by a mode of the file",
        _by_text,
        _set(globals(), "KIND", "x", "fast"),
        shrinks=False,
    ),
    _trap("a global level", "verbosity and optimisation levels", _by_level, _set(globals(), "LEVEL", 5, 4)),
    _trap("an item of a global table", "CONFIG['fast'], as in Detectron", _by_item, _set(OPTIONS, "fast", True)),
    _trap("a global table with a default", "cfg.get('fast', False)", _by_get, _set(OPTIONS, "fast", True)),
    _trap("a global namespace", "yacs, argparse", _by_namespace, _set(vars(SETTINGS), "fast", True)),
    _trap("an attribute of a class", "options as class attributes", _by_class, _on_class),
    _trap("a function that reads a global list", "timm: is_exportable()", _by_function, _set(STATE, 0, True)),
    _trap("a flag of a thread", "threading.local, as Megatron's state", _by_thread, _set(vars(LOCAL), "fast", True)),
    _trap("a context variable that picks", "contextvars for precision and kernels", _by_context, _in_context),
    _trap("a global of an imported file", "from . import config", _by_import, _FLAG),
    _trap("an item by the environment", "os.environ.get", _by_environment, _set(os.environ, "TRAP_FAST", "1")),
    _trap("whether the environment has a name", "'X' in os.environ", _by_presence, _set(os.environ, "TRAP_FAST", "")),
    _trap("a name in the environment", "os.getenv", _by_getenv, _set(os.environ, "TRAP_FAST", "rare"), shrinks=False),
    _trap("options of the network that a method sets", "model.config of transformers", _by_own_options, _own),
    _trap("two flags outside", "FAST and CONFIG['fast']", _by_two, _everything),
    _trap("a flag that only another one reads", "options of options", _in_turn, _FLAG, _everything),
    _trap("a global share of zero", "mixing by a schedule", _gated, _set(globals(), "SHARE", 0.5), shrinks=False),
    _trap(
        "a flag while training",
        "FAST under self.training",
        _by_index,
        make=lambda: _Trains(_by_index),
        trains=[_set(globals(), "FAST", False, True, train=True)],
    ),
]


def _at_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterValues, "record", lambda self, *arguments: [])


ABLATIONS = [
    Ablation("flags outside of the model are recorded both ways", _at_present, "an item of a list, by a global")
]
