"""Methods that run in place of forward, once an exporter or a fusion has bound them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.recording import variants
from tests.engine.traps.trap import Ablation, Trap, Use, once


class _Split(nn.Module):
    """Equal parts, or parts of a size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.c = outputs // 2
        self.cv1 = nn.Conv2d(inputs, 2 * self.c, 1)
        self.inner = nn.Conv2d(self.c, self.c, 3, padding=1)
        self.cv2 = nn.Conv2d(3 * self.c, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).relu().chunk(2, 1))
        return self.cv2(torch.cat([*y, self.inner(y[-1])], 1))  # type: ignore[no-any-return]

    def forward_split(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).relu().split((self.c, self.c), 1))
        return self.cv2(torch.cat([*y, self.inner(y[-1])], 1))  # type: ignore[no-any-return]


class _Heads(nn.Module):
    """Attention with and without the fused op, as many ports switch for export."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward_export(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, n, self.heads * self.head_dim))  # type: ignore[no-any-return]


def _bound(name: str, use: Use) -> Use:
    """Bind a method as the forward of each module that has it, and run the network."""

    def run(model: nn.Module) -> Any:
        for module in model.modules():
            if hasattr(module, name):
                module.forward = types.MethodType(getattr(type(module), name), module)
        return use(model)

    return run


def _pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), _Split(8, 12), nn.ReLU(), _Split(12, 8), nn.Conv2d(8, 2, 1))


def _tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), _Heads(16, 4), nn.ReLU(), nn.Linear(16, 3))


def _zeros(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: torch.zeros(shape, dtype=torch.float64)


TRAPS = [
    Trap(
        name="a split by a number that an exporter binds",
        source="Ultralytics: the exporter binds C2f.forward_split as forward",
        make=_pictures,
        example=_zeros(1, 3, 9, 9),
        uses=[once(2, 3, 8, 11), _bound("forward_split", once(2, 3, 8, 11))],
        shrinks=True,
    ),
    Trap(
        name="attention that is spelled out for an export",
        source="timm and MobileSAM: attention without the fused op for export",
        make=_tokens,
        example=_zeros(2, 7, 5),
        uses=[once(3, 9, 5), _bound("forward_export", once(3, 9, 5))],
        shrinks=True,
    ),
]


def _forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "alternative_forwards", lambda model, nodes: [])


ABLATIONS = [
    Ablation(
        "methods that may run in place of forward are recorded", _forward_only,
        "a split by a number that an exporter binds",
    ),
]  # fmt: skip
