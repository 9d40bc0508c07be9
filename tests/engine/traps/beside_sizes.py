"""Traps: conditions in which a size decides beside something that other calls may find otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from engine.unrecorded import unreached, untaken
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.trap import Ablation, Trap

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(Net):
    """Returns its features as well, under a condition; a method sets what that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.detailed, self.detail, self.kind = False, 0, "logits"
        self.kinds: list[str] = []
        self.enter.kind = "logits"  # type: ignore[assignment]

    def turn(self, kind: str) -> None:
        """Return features from now on."""
        self.detailed, self.detail, self.kind = True, 2, kind
        self.kinds.append(kind)
        self.enter.kind = kind  # type: ignore[assignment]

    @property
    def is_detailed(self) -> bool:
        """Whether features are returned."""
        return self.detailed

    def wants(self, kind: str) -> bool:
        """Whether something of a kind is returned."""
        return self.kind == kind


class _LargeAndFlag(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if len(x) > 40 and self.detailed:
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _LargeAndProperty(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if len(x) > 40 and self.is_detailed:
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _LargeAndNumber(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if len(x) > 40 and self.detail:
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _WidthAndText(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if x.shape[1] == 4 and self.kind == "features":
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _VariableAndRank(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        kind = self.kind
        if (kind == "features" and x.ndim == 2) or x.shape[1] != 4:
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _WidthAndList(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if x.shape[1] == 4 and "features" in self.kinds:
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _WidthAndInner(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)

        def wanted() -> bool:
            return self.kind == "features"

        if x.shape[1] == 4 and wanted():
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _WidthAndMethod(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if x.shape[1] == 4 and self.wants("features"):
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _WidthAndPart(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if x.shape[1] == 4 and self.enter.kind == "features":
            return h.sum(1), self.leave(h)
        return self.leave(h)


class _WidthAndLookUp(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if x.shape[1] == 4 and getattr(self, "kind", None) == "features":
            return h.sum(1), self.leave(h)
        return self.leave(h)


def _results(net: _Net, h: Tensor) -> Any:
    if h.shape[1] == 8 and net.kind == "features":
        return h.sum(1), net.leave(h)
    return net.leave(h)


class _Function(_Net):
    def forward(self, x: Tensor) -> Any:
        return _results(self, self.features(x))


def _turned(model: nn.Module) -> Any:
    model.turn("features")  # type: ignore[operator]
    return called(noise(43))(model)


def _trap(name: str, source: str, make: Callable[[], nn.Module]) -> Trap:
    return Trap(name, source, make, lambda model: noise(2), [called(noise(43)), _turned])


LARGE = "if tokens > limit and self.flag: sliced attention, gradient checkpoints"
WIDTH = "assert-like guards beside a mode: if x.shape[1] == c and self.mode == 'features'"

TRAPS = [
    _trap("a large batch and a flag", LARGE, _LargeAndFlag),
    _trap("a large batch and a property", LARGE, _LargeAndProperty),
    _trap("a large batch and a number", LARGE, _LargeAndNumber),
    _trap("a width and a text", WIDTH, _WidthAndText),
    _trap("a rank and a variable", WIDTH, _VariableAndRank),
    _trap("a width and a list of texts", WIDTH, _WidthAndList),
    _trap("a width and an inner function", WIDTH, _WidthAndInner),
    _trap("a width and a method", WIDTH, _WidthAndMethod),
    _trap("a width and an attribute of a part", WIDTH, _WidthAndPart),
    _trap("a width and an attribute that is looked up", WIDTH, _WidthAndLookUp),
    _trap("a width and an attribute of an argument", WIDTH, _Function),
]


def _other_operands_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "attributes_tested", lambda tests, tree, self_name, module: iter(()))


def _what_did_not_run_is_fixed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(untaken, "replace", lambda conditions, ran: conditions)


ABLATIONS = [
    Ablation(
        "a condition on an attribute is none on sizes", _other_operands_do_not_matter, "a width and a list of texts"
    ),
    Ablation("an operand that was not evaluated may differ", _what_did_not_run_is_fixed, "a large batch and a flag"),
]
