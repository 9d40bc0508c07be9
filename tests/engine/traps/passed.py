"""Traps: options of forward that the model passes on to its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.flow import forward_arguments
from engine.flow.argument_flow import PassedArguments
from engine.flow.effects import effects
from engine.unrecorded import untaken
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class Block(nn.Module):
    """A layer whose caller may ask for centred features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, h: Tensor, centred: bool = False) -> Tensor:
        """Return the features, or the features without their mean."""
        h = self.body(h)
        if centred:
            h = h - h.mean(-1, keepdim=True)
        return h.tanh()


class Net(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.block, self.blocks = Block(), nn.ModuleList([Block()])

    def run(self, h: Tensor, on: bool) -> Tensor:
        """Return what the block makes of features."""
        return self.block(h, on)  # type: ignore[no-any-return]


def _renamed(self: Any, x: Tensor, flag: bool = False) -> Any:
    return self.head(self.blocks[0](self.block(self.stem(x), flag)))


def _in_a_list(self: Any, x: Tensor, flag: bool = False) -> Any:
    x = self.block(self.stem(x))
    for n, block in enumerate(self.blocks):
        x = block(x, centred=flag and n < 3)
    return self.head(x)


def _by_a_method(self: Any, x: Tensor, flag: bool = False) -> Any:
    on = not flag if flag is None else flag
    return self.head(self.blocks[0](self.run(self.stem(x), on)))


def _all_at_once(self: Any, x: Tensor, **options: Any) -> Any:
    return self.head(self.blocks[0](self.block(self.stem(x), **options)))


def _by_position(self: Any, x: Tensor, *options: Any) -> Any:
    return self.head(self.blocks[0](self.block(self.stem(x), *options)))


def _checkpointed(self: Any, x: Tensor, flag: bool = False) -> Any:
    return self.head(self.blocks[0](checkpoint(self.block, self.stem(x), flag, use_reentrant=False)))


def _in_a_mapping(self: Any, x: Tensor, options: dict[str, bool] | None = None) -> Any:
    options = options or {}
    return self.head(self.blocks[0](self.block(self.stem(x), options.get("centred", False))))


def _by_torch(self: Any, x: Tensor, flag: Any = None) -> Any:
    h = self.stem(x)
    if flag:
        h = torch.flip(h, (-1,))
    return self.head(self.block(h))


def _with(**options: Any) -> Use:
    def use(model: nn.Module) -> Any:
        torch.manual_seed(0)
        return model(torch.randn(4, 6, dtype=torch.float64), **options)

    return use


def _second(model: nn.Module) -> Any:
    torch.manual_seed(0)
    return model(torch.randn(4, 6, dtype=torch.float64), True)


def _trap(name: str, source: str, forward: Callable[..., Any], use: Use) -> Trap:
    example = torch.zeros(2, 6, dtype=torch.float64)
    make = lambda: type("Net", (Net,), {"forward": forward, "__module__": __name__})()  # noqa: E731
    return Trap(
        name=name, source=source, make=make, example=lambda _: example, uses=[once(4, 6), use], shrinks=True,
    )  # fmt: skip


TRAPS = [
    _trap("an option under another name", "self.layer(h, output_attentions)", _renamed, _second),
    _trap("an option for the items of a list", "layer(x, use_cache=cache and n > 0)", _in_a_list, _second),
    _trap("an option through a method", "self._inner_forward(x, mode)", _by_a_method, _second),
    _trap("all options at once", "wrappers: return self.model(x, **kwargs)", _all_at_once, _with(centred=True)),
    _trap("all positions at once", "wrappers: return self.model(x, *args)", _by_position, _second),
    _trap("an option through checkpoint", "checkpoint(self.block, x, flag)", _checkpointed, _second),
    _trap("an option of which torch makes something else", "if flag: h = torch.flip(h, (-1,))", _by_torch, _second),
    _trap("an option in a mapping", "joint_attention_kwargs", _in_a_mapping, _with(options={"centred": True})),
]


def _not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_arguments, "passed_arguments", lambda *args: PassedArguments())


def _torch_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken, "effects", lambda nodes, functions, foreign, _: effects(nodes, functions, ["torch"]))
    monkeypatch.setattr(untaken.UntakenBranch, "replaced", lambda self, selecting: set())  # which keeps it as well


ABLATIONS = [
    Ablation(
        "torch is no object of the caller's", _torch_is_the_callers, "an option of which torch makes something else"
    ),
    Ablation("arguments are followed", _not_passed, "all options at once"),
]
