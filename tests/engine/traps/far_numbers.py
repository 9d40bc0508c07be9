"""Networks that read numbers which code of another file sets: see `far_setters`. No code here sets them later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FAR_LIMIT", "OfClass", "OfConfig", "OfGlobal", "OfInstance", "OfLayer"]

FAR_LIMIT = -2.0


class _Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)


class _Clip(nn.Module):
    """Clips features from below."""

    def __init__(self) -> None:
        super().__init__()
        self.far_low = -2.0

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.far_low)


class OfLayer(_Net):
    """Has a layer that reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = _Clip()

    def forward(self, x: Tensor) -> Any:
        """Clip features by the layer."""
        return self.leave(self.clip(self.enter(x)))


class OfInstance(_Net):
    """Reads a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.far_bound = -2.0

    def forward(self, x: Tensor) -> Any:
        """Clip features."""
        return self.leave(self.enter(x).clamp(min=self.far_bound))


class OfClass(_Net):
    """Reads a number of its class."""

    far_floor = -2.0

    def forward(self, x: Tensor) -> Any:
        """Clip features."""
        return self.leave(self.enter(x).clamp(min=self.far_floor))


class OfConfig(_Net):
    """Reads a number of a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Any:
        """Clip features."""
        return self.leave(self.enter(x).clamp(min=self.config.far_minimum))


class OfGlobal(_Net):
    """Reads a global number."""

    def forward(self, x: Tensor) -> Any:
        """Clip features."""
        return self.leave(torch.clamp(self.enter(x), min=FAR_LIMIT))
