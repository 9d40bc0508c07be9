"""Traps: errors that code catches, after which the rest of a block, or of a function, did not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.flow import branches, coverage
from engine.unrecorded import unreached
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]

USES = [once(3, 3, *size) for size in ((8, 8), (9, 10), (10, 9), (9, 9), (16, 16), (7, 12), (12, 6))]
VIEWS = "code that falls back to another layout where `view` is not possible, as detectors of several stages do"
PARTS = "unpacking in a `try`, Python's idiom of asking for forgiveness"


class _Net(nn.Module):
    """Layers between which a function tries something."""

    middle: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.spare, self.fine = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.middle(self.body(x)))  # type: ignore[no-any-return]

    def halves(self, y: Tensor) -> Tensor:
        """Return activations of both halves of an even number of columns, unless the number of rows is even."""
        if y.shape[2] % 2 == 0:
            return self.spare(y)  # type: ignore[no-any-return]
        z = self.fine(y)
        halves = z.reshape(*z.shape[:3], 2, z.shape[3] // 2)
        return halves.sigmoid().flatten(3)  # type: ignore[no-any-return]


def _viewed(net: _Net, y: Tensor) -> Tensor:
    if y.shape[2] % 2 == 0:
        return net.fine(y)  # type: ignore[no-any-return]
    try:
        halves = y.reshape(*y.shape[:3], 2, y.shape[3] // 2)
        return halves.reshape(y.shape).sigmoid()
    except RuntimeError:
        return net.spare(y)  # type: ignore[no-any-return]


def _in_a_method(net: _Net, y: Tensor) -> Tensor:
    try:
        return net.halves(y)
    except RuntimeError:
        return net.spare(y)  # type: ignore[no-any-return]


def _unpacked(net: _Net, y: Tensor) -> Tensor:
    try:
        first, _, last = y.split(4, 2)
    except ValueError:
        return net.spare(y)  # type: ignore[no-any-return]
    return net.fine(first) + last[:, :, :1]  # type: ignore[no-any-return]


def _unpacked_and_added(net: _Net, y: Tensor) -> Tensor:
    try:
        first, second = y.split(8, 2)
        return net.fine(first + second)  # type: ignore[no-any-return]
    except (ValueError, RuntimeError):
        return net.spare(y)  # type: ignore[no-any-return]


def _suppressed(net: _Net, y: Tensor) -> Tensor:
    z = net.spare(y)
    if y.shape[2] % 2:
        with contextlib.suppress(RuntimeError):
            z = y.reshape(*y.shape[:3], 2, y.shape[3] // 2).flatten(3).sigmoid()
    return z  # type: ignore[no-any-return]


def _by_channels(net: _Net, y: Tensor) -> Tensor:
    try:
        return y.view(len(y), 5, y.shape[1] // 5, *y.shape[2:]).flatten(1, 2) * 2
    except RuntimeError:
        return net.spare(y)  # type: ignore[no-any-return]


def _trap(name: str, source: str, middle: Callable[[Any, Tensor], Tensor], size: tuple[int, int] = (8, 8)) -> Trap:
    kind = type("Net", (_Net,), {"__module__": __name__, "middle": middle})
    example = torch.randn(2, 3, *size, dtype=torch.float64)
    return Trap(name, source, kind, lambda model: example, USES, seeds=(0,))


def _without_errors(code: CodeType, always: bool = False) -> branches.FunctionBranches | None:
    """Return the branches of a function as if no error occurred in any block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "swallows_errors", lambda node: [])
        return branches.branches_of.__wrapped__(code, always)


TRAPS = [
    _trap("a view that fails at some sizes", VIEWS, _viewed),
    _trap("a view in a method that fails at some sizes", VIEWS, _in_a_method),
    _trap("parts of another number", PARTS, _unpacked),
    _trap("parts of another number, and of other sizes", PARTS, _unpacked_and_added, (6, 9)),
    _trap("a view whose error is suppressed", VIEWS, _suppressed),
    _trap("a view that fails at this number of channels", VIEWS, _by_channels),
]  # fmt: skip

ABLATIONS = [
    Ablation(
        "the rest of a block after an error",
        lambda patch: patch.setattr(coverage, "branches_of", _without_errors),
        "parts of another number",
    ),
    Ablation(
        "runs that catch an error of their own",
        lambda patch: patch.setattr(coverage.CoverageTracer, "_note_error", lambda self, trace: None),
        "a view in a method that fails at some sizes",
    ),
    Ablation(
        "functions that an error skipped",
        lambda patch: patch.setattr(unreached, "use_values_around_code", lambda *args: None),
        "a view in a method that fails at some sizes",
    ),
]
