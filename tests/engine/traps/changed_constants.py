"""Traps: constants, of which code that did not run makes other values in other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.observations.assumptions import Assumptions
from engine.program.graph import Value
from tests.engine.exactness import Masks, channel_masks
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Layers of which the first is masked, so that what the next one computes is constant."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(5, 8), nn.Linear(8, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        """Return what the masked layer and the next one compute."""
        return self.body(self.stem(x).relu())  # type: ignore[no-any-return]


class _Argument(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        h = self.features(x)
        return self.head(self.mix(h if scale is None else h * scale + 1))


class _Assigned(_Net):
    def forward(self, x: Tensor, keep: Tensor | None = None) -> Any:
        h = self.features(x)
        if keep is not None:
            h = torch.where(keep, h, 1.0)
        return self.head(self.mix(h))


class _Product(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        h = self.features(x)
        return self.head((h if scale is None else h.exp()) @ self.mix.weight)


class _Helper(_Net):
    def warmed(self, h: Tensor, scale: Tensor | None) -> Tensor:
        """Return features, or their exponential."""
        return h if scale is None else h.exp()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.head(self.mix(self.warmed(self.features(x), scale)))


class _Item(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        levels = {"h": self.features(x)}
        if scale is not None:
            levels["h"] = levels["h"].exp()
        return self.head(self.mix(levels["h"]))


class _Field(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        state = SimpleNamespace(h=self.features(x))
        if scale is not None:
            state.h = state.h.exp()
        return self.head(self.mix(state.h))


class _Written(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        h = self.features(x) * 1
        if scale is not None:
            h.add_(scale)
        return self.head(self.mix(h))


class _Before(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        h = self.stem(x).relu()
        return self.head(self.mix(self.body(h if scale is None else h + scale)))


class _Strided(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.head(self.mix(h.relu() if x.is_contiguous() else h))


def _first_dead(model: nn.Module, seed: int) -> Masks:
    """Mask the first layer's weight, so that its bias is all that it computes, and half of the others' channels."""
    masks = channel_masks(model, seed)
    return {**masks, "stem": {"weight": torch.zeros(8, 5, dtype=torch.float64)}}


def _with(value: Any) -> Use:
    """Return a use that passes a value to the argument which the example leaves out."""

    def use(model: nn.Module) -> Any:
        noise = torch.randn(3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(noise, value)

    return use


def _transposed(model: nn.Module) -> Any:
    noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        return model.eval()(noise.t())


_SCALE = torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64)


def _trap(name: str, source: str, make: Callable[[], nn.Module], use: Use) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(2, 5, dtype=torch.float64),
        uses=[once(3, 5), use],
        masks=_first_dead,
        kept="did not run",
        shrinks=True,
    )


TRAPS = [
    _trap(
        "a constant that an argument scales within a call",
        "adaptive norms: self.proj(h if scale is None else h * scale + shift)",
        _Argument,
        _with(_SCALE),
    ),
    _trap(
        "a constant of which a mask replaces a part",
        "padding in encoders of speech: if mask is not None: h = torch.where(mask, h, fill)",
        _Assigned,
        _with(_SCALE > 0),
    ),
    _trap(
        "a constant that is another one in a product",
        "tied weights: (h if temperature is None else h.exp()) @ self.embed.weight",
        _Product,
        _with(_SCALE),
    ),
    _trap(
        "a constant that a method passes on",
        "helpers of public models: def _scale(self, h, scale): return h if scale is None else …",
        _Helper,
        _with(_SCALE),
    ),
    _trap(
        "a constant in an item that is replaced",
        "features in a dictionary: if scale is not None: out['h'] = out['h'].exp()",
        _Item,
        _with(_SCALE),
    ),
    _trap(
        "a constant in a field that is replaced",
        "states of samplers: if guidance is not None: state.h = state.h.exp()",
        _Field,
        _with(_SCALE),
    ),
    _trap(
        "a constant that is written to on demand",
        "diffusers, ControlNet residuals: if residual is not None: h.add_(residual)",
        _Written,
        _with(_SCALE),
    ),
    _trap(
        "a constant before a layer that computes another one",
        "conditioning: self.body(h if cond is None else h + cond)",
        _Before,
        _with(_SCALE),
    ),
    _trap(
        "a constant by the layout of the input",
        "kernels for contiguous memory: h.relu() if x.is_contiguous() else h",
        _Strided,
        _transposed,
    ),
]


def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(self: Assumptions, values: Iterable[Value], reason: str, place: str | None = None) -> None:
        self.used.update({v.index: (v, reason) for v in values if v.index not in self.used})

    monkeypatch.setattr(Assumptions, "use", use)


ABLATIONS = [
    Ablation("what code that did not run reads varies", _still, "a constant that an argument scales within a call"),
    Ablation("what such code replaces a part of varies", _still, "a constant of which a mask replaces a part"),
    Ablation("what an object holds varies", _still, "a constant in a field that is replaced"),
]
