"""Traps: another module or function in a variable that is called, where code that did not run puts it there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.flow import called_variables
from engine.unrecorded import replaced_calls
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

BLOCKS = "timm, layers in a variable: `norm = self.norm_aux if aux else self.norm`"
STEPS = "torchvision, transforms in a list, put together by options"
HOOKS = "feature extractors that register a hook for one call"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.outer(torch.relu(self.inner(h))))


class _Net(nn.Module):
    """Layers between which a subclass calls what a variable holds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.act, self.other = nn.ReLU(), nn.Softmax(-1)
        self.first, self.second = _Block(), _Block()
        self.option: Any = None

    def forward(self, x: Tensor, option: Any = None) -> Any:
        """Return scores, and those of each block."""
        y = self.leave(torch.relu(self.middle(self.between(self.enter(x), option))))
        return y, self.leave(self.first(torch.tanh(self.enter(x)))), self.leave(self.second(torch.sin(self.enter(x))))

    def between(self, h: Tensor, option: Any) -> Tensor:
        """Return features behind what a variable holds."""
        raise NotImplementedError

    def set_option(self, option: Any) -> None:
        """Set what decides."""
        self.option = option


class _Variable(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act: nn.Module = self.act
        if option is not None:
            act = self.other
        return act(h)  # type: ignore[no-any-return]


class _Attribute(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act: nn.Module = self.act
        if self.option is not None:
            act = self.other
        return act(h)  # type: ignore[no-any-return]


class _Length(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act = self.other if len(h) > 40 else self.act
        return act(h)  # type: ignore[no-any-return]


class _TwoSizes(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act: nn.Module = self.act
        if h.shape[0] > 1000 and h.shape[-1] >= 4:
            act = self.other
        return act(h)  # type: ignore[no-any-return]


class _Partial(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act = functools.partial(F.softmax, dim=-1) if option is not None else F.relu
        return act(h)


class _Called(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        return (self.other if option is not None else self.act)(h)  # type: ignore[no-any-return]


class _Appended(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        steps: list[Callable[[Tensor], Tensor]] = []
        if option is not None:
            steps.append(lambda t: t + option)
        steps.append(self.act)
        for step in steps:
            h = step(h)
        return h


class _Inserted(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        steps = [nn.ReLU(), self.middle]
        if self.option is not None:
            steps.insert(1, nn.Softmax(-1))
        for step in steps:
            h = step(h)
        return h


class _Listed(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        layers = [nn.ReLU(), self.middle]
        if option is not None:
            layers = [nn.Softmax(-1), self.middle]
        for layer in layers:
            h = layer(h)
        return h


class _Item(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        layers = [self.act, self.middle]
        if option is not None:
            layers[0] = self.other
        return layers[1](layers[0](h))  # type: ignore[no-any-return]


class _Removed(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        layers = [nn.Sigmoid(), self.act]
        if option is not None:
            layers.pop(0)
        for layer in layers:
            h = layer(h)
        return h


class _Sequential(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        layers: list[nn.Module] = [self.act]
        if option is not None:
            layers.append(self.other)
        return nn.Sequential(*layers)(h)  # type: ignore[no-any-return]


class _Reduced(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        layers: list[nn.Module] = [self.act]
        if option is not None:
            layers += [self.other]
        return functools.reduce(lambda t, layer: layer(t), layers, h)


class _Passed(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act: nn.Module = self.act
        if option is not None:
            act = self.other
        return self.run(h, act)

    def run(self, h: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return features behind a function."""
        return function(h)


class _Returned(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        return self.pick(option)(h)  # type: ignore[no-any-return]

    def pick(self, option: Any) -> nn.Module:
        """Return an activation."""
        if option is not None:
            return self.other
        return self.act


class _Defined(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        act: Callable[[Tensor], Tensor] = self.act
        if option is not None:

            def act(t: Tensor) -> Tensor:
                return t.softmax(-1)

        return act(h)


class _Swapped(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        first, second = self.first, self.second
        if option is not None:
            first, second = second, first
        return first(h) + second(h.flip(1))  # type: ignore[no-any-return]


class _Layer(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        block = self.first
        if option is not None:
            block = self.second
        return block(h)  # type: ignore[no-any-return]


class _Inner(_Net):
    def between(self, h: Tensor, option: Any) -> Tensor:
        def run(t: Tensor) -> Tensor:
            act: nn.Module = self.act
            if option is not None:
                act = self.other
            return act(t)  # type: ignore[no-any-return]

        return run(h)


class _Hook(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.hooked = nn.Linear(8, 8)

    def between(self, h: Tensor, option: Any) -> Tensor:
        handle = None
        if option is not None:
            handle = self.hooked.register_forward_pre_hook(lambda module, args: (args[0] + option,))
        y = self.hooked(torch.relu(h))
        if handle is not None:
            handle.remove()
        return y  # type: ignore[no-any-return]


def _x(rows: int) -> Tensor:
    return torch.randn((rows, 3), generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


@torch.no_grad()
def _plain(model: Any) -> Any:
    return model.eval()(_x(3))


@torch.no_grad()
def _optional(model: Any) -> Any:
    return model.eval()(_x(3), torch.ones(1, dtype=torch.float64))


@torch.no_grad()
def _set(model: Any) -> Any:
    model.set_option(torch.ones(1, dtype=torch.float64))
    return model.eval()(_x(3))


@torch.no_grad()
def _long(model: Any) -> Any:
    return model.eval()(_x(50)), model.eval()(_x(1001))


def _trap(name: str, make: Callable[[], nn.Module], use: Use = _optional, source: str = BLOCKS) -> Trap:
    return Trap(name, source, make, lambda net: torch.zeros(2, 3, dtype=torch.float64), [_plain, use])


TRAPS = [
    _trap("an activation layer in a variable", _Variable),
    _trap("an activation layer in a variable, set later", _Attribute, _set),
    _trap("an activation layer in a variable, by a length", _Length, _long),
    _trap("an activation layer in a variable, by two sizes", _TwoSizes, _long),
    _trap("a partial function in a variable", _Partial),
    _trap("a layer that an expression picks and calls", _Called),
    _trap("a function more in a list", _Appended, source=STEPS),
    _trap("a layer more in a list, set later", _Inserted, _set, source=STEPS),
    _trap("another list of layers", _Listed, source=STEPS),
    _trap("an item of a list of layers", _Item, source=STEPS),
    _trap("a layer less in a list", _Removed, source=STEPS),
    _trap("a layer more in a sequence", _Sequential, source=STEPS),
    _trap("a layer more in a reduction", _Reduced, source=STEPS),
    _trap("an activation layer that is passed on", _Passed),
    _trap("an activation layer that a method picks", _Returned),
    _trap("a function that is defined on demand", _Defined),
    _trap("two blocks that are swapped", _Swapped),
    _trap("another block that ran", _Layer),
    _trap("an activation layer in an inner function", _Inner),
    _trap("a hook on demand", _Hook, source=HOOKS),
]


def _no_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replaced_calls, "_HOOKS", frozenset())


def _no_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replaced_calls, "held_calls", lambda model, choices: [])


def _no_containers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(called_variables, "items_in", lambda value: [])


def _no_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replaced_calls, "_CHANGES", frozenset())


ABLATIONS = [
    Ablation("What goes through a call of a variable in which code that did not run puts another layer", _no_calls,
             "an activation layer in a variable"),
    Ablation("Layers in lists and sequences", _no_containers, "a layer more in a sequence"),
    Ablation("Lists of layers that such code shortens", _no_changes, "a layer less in a list"),
    Ablation("Layers on which such code registers a hook", _no_hooks, "a hook on demand"),
]  # fmt: skip
