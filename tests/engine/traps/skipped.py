"""Traps: code that ran in all recordings, and that other calls leave out without running anything in its place."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.flow import branches
from engine.removal import keep
from engine.unrecorded import skipped_code, untaken
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two, self.leave = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def layers(self) -> tuple[nn.Module, nn.Module]:
        """Return those between."""
        return self.one, self.two


class _Skipped(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.enter(x).relu()
        if x.is_contiguous():
            y = self.two(self.one(y).relu()).relu()
        return self.leave(y)


class _SkippedOnALine(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.two(self.enter(x).relu()).relu()
        if str(len(x)) != "20": y = self.one(y).relu()  # fmt: skip  # noqa: E701
        return self.leave(y)


class _SkippedInALoop(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.enter(x).relu()
        for layer in self.layers():
            if x.is_contiguous():
                y = layer(y).relu()
        return self.leave(y)


class _Continues(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.enter(x).relu()
        for layer in self.layers():
            if not x.is_contiguous():
                continue
            y = layer(y).relu()
        return self.leave(y)


class _Breaks(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.enter(x).relu()
        for layer in self.layers():
            if not x.is_contiguous():
                break
            y = layer(y).relu()
        return self.leave(y)


class _PassesOn(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.enter(x).relu()
        for layer in self.layers():
            if x.is_contiguous():
                z = layer(y).relu()
            else:
                z = y
            y = z
        return self.leave(y)


class _Shifted(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.two(self.one(self.enter(x).relu()).relu()).relu()
        if x.is_contiguous():
            y = y + 1.0
        return self.leave(y)


class _Scaled(_Layers):
    """A scale that closes a channel, which is open where the scale is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        y = self.enter(x)
        if x.is_contiguous():
            y = y * self.scale
        return self.leave(y)


class _Instead(_Layers):
    """What a layer computes goes on unless something else takes its place; at the example nothing reads it."""

    def forward(self, x: Tensor) -> Any:
        y, z = self.enter(x), self.one(x)
        if x.is_contiguous():
            y = y + self.two(x)
            z = y.relu()
        return self.leave(z)


class _InsteadOfAParameter(_Layers):
    """The same with a parameter that no op reads at the example."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        z: Tensor = self.start
        if x.is_contiguous():
            z = self.enter(x).relu()
        return self.leave(z)


class _InsteadOfANewTensor(_Layers):
    def forward(self, x: Tensor) -> Any:
        z = torch.ones(8, dtype=x.dtype)
        if x.is_contiguous():
            z = self.enter(x).relu()
        return self.leave(z)


class _Conditioned(_Layers):
    """An embedding that is added on demand, as that of a time step in diffusion models."""

    def forward(self, x: Tensor) -> Any:
        y = self.enter(x)
        if x.is_contiguous():
            y = y + self.one(x)
        y = self.two(y.relu())
        return self.leave(y)


class _Residual(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.enter(x)
        for layer in self.layers():
            if x.is_contiguous():
                y = y + layer(y.relu())
        return self.leave(y)


class _Normed(_Layers):
    """The norm alone closes a channel; what it reads goes on where it is skipped."""

    def forward(self, x: Tensor) -> Any:
        y = self.enter(x)
        if x.is_contiguous():
            y = self.norm(y + self.two(self.one(y).relu()))
        return self.leave(y)


class _NormedBehindALayer(_Layers):
    """A norm closes a channel that a layer of its own computes, which nothing reads unless the norm is skipped."""

    def forward(self, x: Tensor) -> Any:
        y = self.two(self.one(self.enter(x)).relu())
        if x.is_contiguous():
            y = self.norm(y)
        return self.leave(y)


class _Dropped(_Layers):
    """Layers that are dropped in some steps, as BART's are."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, x: Tensor) -> Any:
        y = self.enter(x).relu()
        for layer in self.layers():
            if self.training and torch.rand(()) < 0.4:
                continue
            y = y + layer(y).relu() if self.residual else layer(y).relu()
        return self.leave(y)


class _TurnedAtTimes(_Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.two(self.one(self.enter(x).relu()).relu()).relu()
        if self.training and random.random() < 0.4:
            y = y.roll(3, 1)
        return self.leave(y)


def _trained(seed: int) -> Use:
    def use(model: nn.Module) -> Any:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        torch.manual_seed(seed)
        random.seed(seed)
        return model.train()(x).detach()

    return use


def _by_scale(model: nn.Module, seed: int) -> Masks:
    return {"": {"scale": (torch.arange(8) != 3 + seed).double()}}


def _by_norm(model: nn.Module, seed: int) -> Masks:
    row = (torch.arange(8) != 3 + seed).double()
    return {"norm": {"weight": row, "bias": row}, "one": {"weight": row.expand(8, 8)}}


def _by_norm_and_reader(model: nn.Module, seed: int) -> Masks:
    """Close a channel behind the norm, and let it alone read a channel of a layer before."""
    row = (torch.arange(8) != 3 + seed).double()
    weight = torch.ones(8, 8, dtype=torch.float64)
    weight[row == 1, 2] = 0.0
    return {"norm": {"weight": row, "bias": row}, "two": {"weight": weight}}


def _turned(model: nn.Module) -> Any:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).t()
    with torch.no_grad():
        return model.eval()(x)


def _trap(name: str, source: str, make: Callable[[], nn.Module], *uses: Use, **more: Any) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(4, 8, dtype=torch.float64),
        uses=[_turned, once(20, 8), once(3, 8), *uses],
        **more,
    )


TRAPS = [
    _trap("layers that are skipped", "if x.is_contiguous(): x = self.fast(x)", _Skipped),
    _trap("a layer that is skipped on one line", "if str(n) in self.sizes: x = layer(x)", _SkippedOnALine),
    _trap("layers that are skipped in a loop", "layer drop, arXiv 1909.11556", _SkippedInALoop),
    _trap("a loop that goes on", "layer drop by continue: fairseq, transformers", _Continues),
    _trap("a loop that ends", "early exits by break", _Breaks),
    _trap("a loop that passes on what it has", "z = layer(y) if used else y, as statements", _PassesOn),
    _trap("a shift that is skipped", "if x.is_contiguous(): x = x + 1", _Shifted),
    _trap("a scale that is skipped", "if scale is not None: x = x * self.gamma", _Scaled, masks=_by_scale),
    _trap("a value that another one replaces at the example", "z = skip(x); if use: z = block(x)", _Instead),
    _trap("a parameter that a value replaces at the example", "z = self.token; if use: z = f(x)", _InsteadOfAParameter),
    _trap("a new tensor that a value replaces at the example", "z = ones(8); if use: z = f(x)", _InsteadOfANewTensor),
    _trap(
        "an embedding that is skipped", "diffusers: if temb is not None: h = h + temb", _Conditioned, shrinks="repaired"
    ),
    _trap("residual layers that are skipped", "layer drop of residual layers, BART", _Residual, shrinks="repaired"),
    *(
        _trap(
            f"layers that are dropped in training, {'residual' if residual else 'plain'} ones",
            "layer drop, arXiv 1909.11556: fairseq, transformers",
            lambda residual=residual: _Dropped(residual),
            trains=[_trained(seed) for seed in range(6)],
            shrinks=residual and "repaired",
        )
        for residual in (True, False)
    ),
    _trap(
        "a shuffle in some steps",
        "manifold mixup, shake-shake",
        _TurnedAtTimes,
        trains=[_trained(seed) for seed in range(6)],
    ),
    _trap("a norm that is skipped", "a block with its norm behind the sum, skipped", _Normed, masks=_by_norm),
    _trap(
        "a norm behind a layer that is skipped",
        "a norm that is skipped, and a channel that is read for one of its own alone",
        _NormedBehindALayer,
        masks=_by_norm_and_reader,
    ),
]


def _no_other_side(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branches, "other_side_of", lambda statement, offsets: None)


def _no_loops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branches, "bodies_of_loops", lambda tree: {})


def _all_aligned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(skipped_code, "are_aligned", lambda values, dataflow: True)
    patch.setattr(keep, "_are_same", lambda slots: True)


def _all_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(untaken.UntakenBranch, "holds_unread", lambda self, variable, stored: False)


def _none_standing_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keep, "_interchangeable", lambda structure, constants: ())


def _no_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(untaken, "is_in_loop", lambda nodes, tree: False)


def _modes_stay(patch: pytest.MonkeyPatch) -> None:
    def is_false(self: Any, test: ast.expr) -> bool:
        held = self._attribute(test) if isinstance(test, ast.Attribute) else None
        return isinstance(held, (bool, int, str)) and not held

    patch.setattr(untaken.UntakenBranch, "_is_false", is_false)


ABLATIONS = [
    Ablation("a mode is not false for good", _modes_stay, "a shuffle in some steps", True),
    Ablation("a condition without an else has another side", _no_other_side, "layers that are skipped in a loop", True),
    Ablation("a jump in a loop leaves the rest of it out", _no_loops, "a loop that goes on", True),
    Ablation("what is skipped has the channels of what stands in its place", _all_aligned, "a loop that ends", True),
    Ablation("a channel of what stands in goes if it is zero as well", _none_standing_in, "a norm that is skipped"),
    Ablation(
        "values of different layers stand in for one another only where they lose the same channels",
        _none_standing_in,
        "a value that another one replaces at the example",
        True,
    ),
    Ablation("a tensor that no op read may go on", _all_read, "a parameter that a value replaces at the example", True),
    Ablation("what is in front of a scale has to be zero as well", _none_standing_in, "a scale that is skipped"),
    Ablation("a variable holds another value in another round", _no_rounds, "a loop that passes on what it has", True),
]
