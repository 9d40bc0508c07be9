"""Traps: what code that did not run reads by way of functions, objects and variables that other ways of running set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.flow import coverage
from engine.recording.tape import Tape
from engine.running import held_tensors
from engine.unrecorded.untaken import UntakenBranch
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "MANY", "TRAPS", "of_many"]

MANY = 43
"""A batch at which the code runs that did not: larger than any that is tried."""


class _Net(Net):
    """What it returns of a large batch, beside the result, is for its subclasses to say."""

    inner = False

    def look_inside(self, inner: bool) -> None:
        """Run otherwise from now on."""
        self.inner = inner


# ---------------------------------------------------------------- functions and objects


class _Closure(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)

        def norms() -> Tensor:
            return h.square().mean(1)  # type: ignore[no-any-return]

        return (y, norms()) if len(x) > 40 else y


class _Partial(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y, total = self.leave(h), functools.partial(torch.sum, h, dim=1)
        return (y, total()) if len(x) > 40 else y


class _Generator(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y, norms = self.leave(h), (t.square().mean(1) for t in [h])
        return (y, next(norms)) if len(x) > 40 else y


class _State:
    def __init__(self, h: Tensor) -> None:
        self.h = h

    def norms(self) -> Tensor:
        """Return one number for each sample."""
        return self.h.square().mean(1)


class _Method(_Net):
    def forward(self, x: Tensor) -> Any:
        state = _State(self.features(x))
        y = self.leave(state.h)
        return (y, state.norms()) if len(x) > 40 else y


class _Namespace(_Net):
    def forward(self, x: Tensor) -> Any:
        state = SimpleNamespace(levels=[x, self.features(x)])
        y = self.leave(state.levels[-1])
        return (y, state.levels[-1].square().mean(1)) if len(x) > 40 else y


class _Passed(_Net):
    def finish(self, y: Tensor, states: dict[str, _State]) -> Any:
        return (y, states["h"].h.square().mean(1)) if len(y) > 40 else y

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.finish(self.leave(h), {"h": _State(h)})


class _Replaced(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        state = _State(self.features(x))
        if len(x) > 40:
            state = _State(self.between(state.h))
        return self.leave(state.h)


# ---------------------------------------------------------------- other ways of running


class _NestedInTraining(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        if self.training:
            z = h
            if len(x) > 40:
                return y, z.square().mean(1)
        return y


class _MethodInTraining(_Net):
    def statistics(self, h: Tensor) -> Tensor | None:
        return h.square().mean(1) if len(h) > 40 else None

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        return (y, self.statistics(h)) if self.training else y


class _OtherInTraining(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        z = h if self.training else y
        return (y, z.square().mean(1)) if len(x) > 40 else y


class _OtherByFlag(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        z = h if self.inner else y
        return (y, z.square().mean(1)) if len(x) > 40 else y


class _OtherByArgument(_Net):
    def forward(self, x: Tensor, inner: bool = False) -> Any:
        h = self.features(x)
        y = self.leave(h)
        z = h if inner else y
        return (y, z.square().mean(1)) if len(x) > 40 else y


class _OtherByData(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        z = h if x.mean() > 0.5 else y
        return (y, z.square().mean(1)) if len(x) > 40 else y


class _OtherBySize(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y = self.leave(h)
        z = h if len(x) > 3 else y
        return (y, z.square().mean(1)) if len(x) > 40 else y


class _OtherLayer(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        y, layer = self.leave(h), torch.relu if self.training else self.leave
        return (y, layer(h).square().mean(1)) if len(x) > 40 else y


def _train(model: nn.Module) -> Any:
    return _detached(model.train()(noise(MANY)))


def _detached(result: Any) -> list[Tensor]:
    return [result.detach()] if isinstance(result, Tensor) else [t.detach() for t in result]


def _looking_inside(model: nn.Module) -> Any:
    model.look_inside(True)  # type: ignore[operator]
    return called(noise(MANY))(model)


def of_many(name: str, source: str, make: Callable[[], nn.Module], *uses: Use, **options: Any) -> Trap:
    """Return a trap that runs on a large batch, and in further ways."""
    return Trap(name, source, make, lambda model: noise(2), [called(noise(MANY)), *uses], **options)


TRAPS = [
    of_many("a closure that is called for a large batch", "def aux(): return h.norm()", _Closure),
    of_many("a partial function that is called for a large batch", "partial(self.loss, h)", _Partial),
    of_many("a generator that is read for a large batch", "(head(f) for f in features)", _Generator),
    of_many("a method of an object that holds a tensor", "detectron2: instances and image lists", _Method),
    of_many("a level in a namespace", "state = SimpleNamespace(features=[…])", _Namespace),
    of_many("an object in a dictionary", "samples = NestedTensor(h, mask)", _Passed),
    of_many("an object in the place of another", "NestedTensor(self.proj(src.tensors), mask)", _Replaced),
    of_many("a condition inside of train mode", "if self.training: if self.steps > …: …", _NestedInTraining,
          trains=[_train]),
    of_many("a method of train mode", "self.aux_loss(h) if self.training", _MethodInTraining, trains=[_train]),
    of_many("another variable in train mode", "feat = h if self.training else y", _OtherInTraining, trains=[_train]),
    of_many("another variable by a flag", "feat = h if self.return_features else y", _OtherByFlag, _looking_inside),
    of_many("another variable by an argument", "feat = h if pre_logits else y", _OtherByArgument,
          called(noise(MANY), inner=True)),
    of_many("another variable by data", "z = h if score > 0.5 else y", _OtherByData, called(noise(MANY) + 2)),
    of_many("another variable by a size", "z = h if len(x) > 3 else y", _OtherBySize),
    of_many("another layer in train mode", "head = nn.Identity() if self.training else self.head", _OtherLayer,
          trains=[_train]),
]  # fmt: skip


def _calls_of_layers(self: UntakenBranch, node: Any) -> bool:
    return bool(self.modules_held(getattr(node, "id", "")))


ABLATIONS = [
    Ablation(
        "what functions and objects hold is read",
        lambda patch: patch.setattr(held_tensors, "tensors_held_by", lambda held: iter(())),
        "a closure that is called for a large batch",
    ),
    Ablation(
        "a run in which code that did not run would read something else is kept",
        lambda patch: patch.setattr(Tape, "origins", lambda self, kept: []),
        "another variable by an argument",
    ),
    Ablation(
        "a variable that may hold a layer and something else is called as either",
        lambda patch: patch.setattr(UntakenBranch, "is_module", _calls_of_layers),
        "another layer in train mode",
    ),
    Ablation(
        "a run in train mode that leads further is kept",
        lambda patch: patch.setattr(coverage.CoverageTracer, "_opens_branches", lambda self, key: False),
        "a method of train mode",
    ),
]
