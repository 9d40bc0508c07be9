"""Traps: rounds of a loop that no recording reached, in which code reorders channels, and weights changed on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.flow.conditions import Conditions
from engine.unrecorded.untaken import UntakenBranch
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

# ---------------------------------------------------------------- the number of a round


class _Rounds(Net):
    steps = 3

    def set_steps(self, steps: int) -> None:
        """Take as many steps from now on."""
        self.steps = steps


class _Argument(_Rounds):
    def forward(self, x: Tensor, rounds: int = 3) -> Tensor:
        h = self.features(x)
        for i in range(rounds):
            if i >= 5:
                h = h.flip(1)
        return self.leave(h)  # type: ignore[no-any-return]


class _Attribute(_Rounds):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        for i in range(1, self.steps):
            if i == 7:
                h = h.flip(1)
        return self.leave(h)  # type: ignore[no-any-return]


class _Frames(_Rounds):
    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for t, frame in enumerate(self.features(x).unbind(1)):
            if t >= 20:
                frame = frame.flip(-1)
            outputs.append(self.leave(frame))
        return torch.stack(outputs, 1)


class _Comprehension(_Rounds):
    def forward(self, x: Tensor) -> Tensor:
        frames = self.features(x).unbind(1)
        return torch.stack([self.leave(f if t < 20 else f.flip(-1)) for t, f in enumerate(frames)], 1)


class _Parts(_Rounds):
    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.features(x).split(2, 1))
        for i, part in enumerate(reversed(parts)):
            if i >= 10:
                parts[i] = part.flip(-1)
        return self.leave(torch.cat(parts, 1))  # type: ignore[no-any-return]


class _Samples(_Rounds):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        for i in range(x.shape[0]):
            if i == 40:
                h = h.flip(1)
        return self.leave(h)  # type: ignore[no-any-return]


class _EveryEighth(_Rounds):
    def forward(self, x: Tensor, rounds: int = 3) -> Tensor:
        h = self.features(x)
        for i in range(rounds):
            h = h * 1.1
            if i % 8 == 7:
                h = h.flip(1)
        return self.leave(h)  # type: ignore[no-any-return]


class _Layers(_Rounds):
    """The number of layers is the same in every call, so that nothing has to stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.named = nn.ModuleDict({"last": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = self.features(x), []
        for i, layer in enumerate(self.layers):
            h = layer(h) if i < 5 else layer(h).flip(1)
            outputs.append(h)
        for i, (_, layer) in enumerate(self.named.items()):
            h = layer(h) if i < 3 else layer(h).flip(1)
        for i, output in enumerate(zip(outputs, outputs[::-1], strict=True)):
            if i > 4:
                h = output[0].flip(1)
        return self.leave(sum(h if i < 7 else h.flip(1) for i, _ in enumerate(self.layers)))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- weights in variables


class _Weights(Net):
    delta: Tensor | None = None

    def set_delta(self, delta: Tensor | None) -> None:
        """Adapt the first layer from now on."""
        self.delta = delta


class _Delta(_Weights):
    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        weight = self.enter.weight
        if delta is not None:
            weight = weight + delta
        return self.leave(torch.relu(F.linear(x, weight, self.enter.bias)))  # type: ignore[no-any-return]


class _SetDelta(_Weights):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.enter.weight
        if self.delta is not None:
            weight = weight + self.delta
        return self.leave(torch.relu(F.linear(x, weight, self.enter.bias)))  # type: ignore[no-any-return]


class _Sigmoid(_Weights):
    def forward(self, x: Tensor, temperature: float | None = None) -> Tensor:
        weight = self.enter.weight
        if temperature is not None:
            weight = torch.sigmoid(weight / temperature)
        return self.leave(torch.relu(F.linear(x, weight, self.enter.bias)))  # type: ignore[no-any-return]


class _Bias(_Weights):
    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        bias = self.enter.bias
        if delta is not None:
            bias = bias + delta
        return self.leave(torch.relu(F.linear(x, self.enter.weight, bias)))  # type: ignore[no-any-return]


def _steps(count: int) -> Use:
    def use(model: nn.Module) -> Any:
        model.set_steps(count)  # type: ignore[operator]
        return called(noise(3))(model)

    return use


def _adapted(delta: Tensor) -> Use:
    def use(model: nn.Module) -> Any:
        model.set_delta(delta)  # type: ignore[operator]
        return called(noise(3))(model)

    return use


def _tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


_FRAMES = "per-frame heads with a warm-up"
_KEPT = "could be read by the code at"


def _trap(name: str, source: str, make: Callable[[], nn.Module], example: Tensor, uses: Sequence[Use]) -> Trap:
    return Trap(name, source, make, lambda model: example, uses)


TRAPS = [
    _trap("a late round by an argument", "iterative refinement", _Argument, noise(3), [called(noise(3), 6)]),
    _trap("a late round by an attribute", "samplers with a number of steps", _Attribute, noise(3), [_steps(9)]),
    _trap("a late frame", _FRAMES, _Frames, _tensor(2, 6, 4), [called(_tensor(2, 30, 4))]),
    _trap("a late frame in a comprehension", _FRAMES, _Comprehension, _tensor(2, 6, 4), [called(_tensor(2, 30, 4))]),
    _trap("a late part", "chunked inference", _Parts, _tensor(2, 6, 4), [called(_tensor(2, 50, 4))]),
    _trap("a late sample", "loops over a batch", _Samples, noise(3), [called(noise(43))]),
    _trap("every eighth round", "iterative refinement", _EveryEighth, noise(3), [called(noise(3), 8)]),
    Trap("the number of a layer", "nested U-Nets", _Layers, lambda model: noise(3), [called(noise(5))], shrinks=True),
    _trap("a weight plus an argument", "adapters", _Delta, noise(3), [called(noise(3), _tensor(1)),
          called(noise(3), _tensor(8, 4))]),
    _trap("a weight plus an attribute", "adapters", _SetDelta, noise(3), [_adapted(_tensor(8, 4))]),
    _trap("the sigmoid of a weight", "binary masks of weights", _Sigmoid, noise(3), [called(noise(3), 0.5)]),
    _trap("a bias plus an argument", "adapters", _Bias, noise(3), [called(noise(3), _tensor(8))]),
]  # fmt: skip


def _counts_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Conditions, "_may_count_further", lambda self, name, binding, visited: False)


def _of_results_alone(patch: pytest.MonkeyPatch) -> None:
    effects = UntakenBranch.effects

    def without_weights(self: UntakenBranch) -> Any:
        return {n: effect for n, effect in effects(self).items() if "stored" not in dict(self._seen.get(n, ()))}

    patch.setattr(UntakenBranch, "effects", without_weights)


ABLATIONS = [
    Ablation("a longer loop counts further", _counts_alike, "a late round by an argument", repaired=True),
    Ablation("code that did not run may change weights", _of_results_alone, "a weight plus an argument", repaired=True),
]
