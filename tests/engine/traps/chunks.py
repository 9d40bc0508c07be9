"""Traps: loops over chunks that carry something on, of which the example has only one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.running.provenance import Provenance
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]


class Net(nn.Module):
    """A stem, a layer over what is carried on, and a head.

    Args:
        length: of a chunk.
        way: how the loop carries something on.
    """

    def __init__(self, length: int, way: str) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.length, self.way = length, way

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of each place."""
        return torch.cat(self.zeros(x) if self.way == "zeros" else self.nothing(x), 1)

    def zeros(self, x: Tensor) -> list[Tensor]:
        """Begin with zeros."""
        carry, outputs = torch.zeros(8, dtype=x.dtype), []
        for part in x.split(self.length, 1):
            h = torch.tanh(self.stem(part) + self.mix(carry))
            carry = h[0, -1]
            outputs.append(self.head(h))
        return outputs

    def nothing(self, x: Tensor) -> list[Tensor]:
        """Begin with nothing."""
        carry: Any = None
        outputs = []
        for part in torch.split(x, self.length, dim=1):
            h = self.stem(part).relu()
            h = h if carry is None else h + self.mix(carry)
            carry = h.mean(1, keepdim=True)
            outputs.append(self.head(h))
        return outputs


def _trap(name: str, source: str, length: int, way: str) -> Trap:
    example = torch.zeros(2, 4, 6, dtype=torch.float64)
    uses = [once(2, tokens, 6) for tokens in (4, 8, 3, 11, 45)]
    return Trap(
        name=name, source=source, make=lambda: Net(length, way), example=lambda _: example, uses=uses,
        shrinks=way == "nothing",
    )  # fmt: skip


TRAPS = [
    _trap("a chunk after zeros", "chunked recurrence: for part in x.split(n, 1)", 4, "zeros"),
    _trap("a chunk after nothing", "streaming encoders: if carry is not None", 4, "nothing"),
    _trap("a chunk that is not full after zeros", "segment-level recurrence", 6, "zeros"),
    _trap("a chunk that is far from full after zeros", "segment-level recurrence", 40, "zeros"),
    _trap("a chunk that is not full after nothing", "segment-level recurrence", 6, "nothing"),
]


def _only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Provenance, "_note_single_part", lambda self, *args: None)


ABLATIONS = [
    Ablation("a loop over one part may run more often", _only_one, "a chunk that is far from full after zeros")
]
