"""Building blocks for the samples of rules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["Apply", "Head", "chain", "residual"]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call the function with the outputs of the parts, or with the input if there are none."""
        return self.function(*(part(x) for part in self.parts)) if len(self.parts) else self.function(x)


class Head(nn.Module):
    """Mean over all positions and a linear layer, so that the last channels before it can be removed too."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (batch, outputs)."""
        pooled: Tensor = self.linear(x.flatten(2).mean(2))
        return pooled


def chain(*layers: nn.Module, flat: bool = False) -> nn.Sequential:
    """Return a sequential model with a head on top."""
    head = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)) if flat else Head()
    return nn.Sequential(*layers, head)


def residual(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum."""
    return x + y
