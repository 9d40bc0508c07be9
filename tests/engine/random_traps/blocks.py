"""What a block is: a small module that maps feature maps or tokens, and does on the way what public code does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

__all__ = ["BLOCKS", "Block", "along", "axis", "block", "layer", "positions"]


class Block(nn.Module):
    """Maps (N, C, H, W), or tokens (N, L, C), to such a tensor, or to one and something else that the network returns.

    Args:
        kind: "image" or "tokens".
        width: number of channels that come in.
        draw: chooses among variants.

    Attributes:
        out: number of channels that come out.
    """

    noisy: ClassVar[bool] = False
    """Whether train mode draws as many random numbers as there are channels, which no two widths can share."""

    tolerance: ClassVar[float] = 1e-9
    """What may differ, relative to the largest entry."""

    derived: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold what follows from weights alone, which may be narrower afterwards."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__()
        self.out = width

    def later(self) -> None:
        """Change what a callback would change between epochs."""


BLOCKS: dict[str, list[type[Block]]] = {"image": [], "tokens": []}


def block(*kinds: str) -> Callable[[type[Block]], type[Block]]:
    """Return a decorator that lists a class of blocks, for both kinds where none is named."""

    def register(cls: type[Block]) -> type[Block]:
        for kind in kinds or tuple(BLOCKS):
            BLOCKS[kind].append(cls)
        return cls

    return register


def layer(kind: str, inputs: int, outputs: int, kernel: int = 1, **options: Any) -> nn.Module:
    """Return a convolution or a linear layer."""
    if kind == "image":
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)
    return nn.Linear(inputs, outputs, **options)


def axis(x: Tensor) -> int:
    """Return the dimension of the channels."""
    return 1 if x.ndim == 4 else 2


def positions(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions that are neither batch nor channels."""
    return (2, 3) if x.ndim == 4 else (1,)


def along(x: Tensor, vector: Tensor) -> Tensor:
    """Return a vector of channels such that it broadcasts along a tensor's."""
    return vector.view(-1, 1, 1) if x.ndim == 4 else vector
