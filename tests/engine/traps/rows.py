"""Traps: functions beside methods that take entries by an index which the example leaves out, along some dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.observations import indexed_reads
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


def _rows(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h[keep]
    return h


def _channels(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h[:, keep]
    return h


def _last(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h[..., keep]
    return h


def _select(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h.index_select(-1, keep)
    return h


def _select_by_name(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = torch.index_select(h, dim=1, index=keep)
    return h


def _gather(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h.gather(0, keep.expand(4, 8) % 4)
    return h


def _mask(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h[torch.ones_like(h).bool()].view(4, 8).flip(1)
    return h


def _backwards(h: Tensor, keep: Any) -> Tensor:
    if keep is not None:
        h = h.narrow(1, 4, 4).repeat(1, 2)
    return h


class Net(nn.Module):
    """A stem, a function, and two layers."""

    def __init__(self, step: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.step = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), [step]

    def forward(self, x: Tensor, keep: Any = None) -> Any:
        """Return logits."""
        step = self.step[0]
        return self.head(self.body(step(self.stem(x).relu(), keep)).tanh())


def _call(keep: Any) -> Use:
    def use(model: nn.Module) -> Any:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(x, keep)

    return use


def _trap(name: str, source: str, step: Callable[[Tensor, Any], Tensor], keep: Any = None) -> Trap:
    example = torch.zeros(2, 6, dtype=torch.float64)
    order = torch.arange(7, -1, -1) if keep is None else keep
    return Trap(
        name=name, source=source, make=lambda: Net(step), example=lambda _: example,
        uses=[_call(None), _call(order)], shrinks=True,
    )  # fmt: skip


TRAPS = [
    _trap("rows by an index", "def kept(h, keep=None): h = h[keep]", _rows, torch.tensor([1, 3])),
    _trap("channels by an index", "def permuted(h, order=None): h = h[:, order]", _channels),
    _trap("last dimension by an index", "h[..., order]", _last),
    _trap("channels by index_select", "h.index_select(-1, order)", _select),
    _trap("channels by index_select and a name", "torch.index_select(h, dim=1, index=order)", _select_by_name),
    _trap("rows gathered for each channel", "h.gather(0, order)", _gather),
    _trap("entries by a mask", "h[mask].view(…)", _mask),
    _trap("half of the channels", "h.narrow(1, 4, 4)", _backwards),
]


def _any_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_reads, "_is_beside", lambda ndim, dims, channel_dim: True)


ABLATIONS = [Ablation("only rows are left alone", _any_dimension, "channels by index_select and a name")]
