"""Layer norms over channels as public code writes them out, each with its source."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["NORMS", "Normalised"]


class Norm(nn.Module):
    """A scale and a shift per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels, 1, 1)), nn.Parameter(torch.zeros(channels, 1, 1))
        self.eps = 1e-3


class Squares(Norm):
    """LayerNorm2d of ConvNeXt and of Segment Anything."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight * x + self.bias


class Difference(Norm):
    """The difference has a name, and the names of what was subtracted hold something else afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        mean = torch.mean(x, dim=1, keepdim=True)
        centred = x - mean
        x = mean = centred * 2
        root = torch.sqrt(torch.mean(centred * centred, dim=1, keepdim=True) + self.eps)
        return self.weight * (x + mean) / (4 * root) + self.bias


class ByFunctions(Norm):
    """Every operator by its name."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        centred = torch.sub(x, torch.mean(x, 1, keepdim=True))
        root = torch.sqrt(torch.mean(torch.mul(centred, centred), 1, keepdim=True).add(self.eps))
        return torch.mul(self.weight, centred.div(root)).add(self.bias)


class ByMethods(Norm):
    """Every operator by the name of a tensor's method."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        u = x.mean(1, keepdim=True)
        s = x.sub(u).pow(2).mean(1, keepdim=True)
        return x.sub(u).div(s.add(self.eps).sqrt()).mul(self.weight).add(self.bias)


class InPlaceOfTheInput(Norm):
    """T5's norm with the mean subtracted first."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        x = x - x.mean(1, keepdim=True)
        return self.weight * x * torch.rsqrt((x**2).mean(1, keepdim=True) + self.eps) + self.bias


class Deviation(Norm):
    """The Annotated Transformer: an unbiased standard deviation, with eps outside of the root."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        mean = x.mean(1, keepdim=True)
        std = x.std(1, keepdim=True)
        return self.weight * (x - mean) / (std + self.eps) + self.bias


class Variance(Norm):
    """Restormer's, lucidrains' and many others."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        mu = x.mean(1, keepdim=True)
        sigma = torch.var(x, dim=1, unbiased=False, keepdim=True)
        return (x - mu) / torch.sqrt(sigma + self.eps) * self.weight + self.bias


class VarianceAlone(Norm):
    """Restormer's norm without a bias: nothing is subtracted."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        del self.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        return x / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + self.eps) * self.weight


class Both(Norm):
    """``torch.var_mean``, as in timm's older layer norms over channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        spread, mean = torch.var_mean(x, 1, keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(spread + self.eps) * self.weight + self.bias


class Global(Norm):
    """Asteroid's global layer norm: over channels and positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        dims = list(range(1, len(x.shape)))
        mean = x.mean(dim=dims, keepdim=True)
        spread = torch.var(x, dim=dims, keepdim=True, unbiased=False)
        return (x - mean) / (spread + self.eps).sqrt() * self.weight + self.bias


class OneAfterTheOther(Norm):
    """Conv-TasNet's global layer norm: over channels, and then over positions."""

    def forward(self, y: Tensor) -> Tensor:
        """Return the normalised tensor."""
        mean = y.mean(dim=1, keepdim=True).mean(dim=(2, 3), keepdim=True)
        spread = (torch.pow(y - mean, 2)).mean(dim=1, keepdim=True).mean(dim=(2, 3), keepdim=True)
        return self.weight * (y - mean) / torch.pow(spread + self.eps, 0.5) + self.bias


class AllAtOnce(Norm):
    """A global layer norm of squares, its dimensions counted from the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        centred = x - x.mean((-3, -2, -1), keepdim=True)
        return self.weight * centred / (centred.square().mean((-3, -2, -1), keepdim=True) + self.eps).sqrt() + self.bias


class MeanSize(Norm):
    """Activations over their mean absolute value, of all channels and positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        return self.weight * x / (self.eps + x.abs().mean((1, 2, 3), keepdim=True)) + self.bias


NORMS = [
    Squares,
    Difference,
    ByFunctions,
    ByMethods,
    InPlaceOfTheInput,
    Deviation,
    Variance,
    VarianceAlone,
    Both,
    Global,
    OneAfterTheOther,
    AllAtOnce,
    MeanSize,
]


class Normalised(nn.Module):
    """A stream with a residual branch, each part behind a norm."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.first, self.last = nn.Conv2d(3, 8, 1), norm(8), norm(8)
        self.branch = nn.Sequential(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 1))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x)
        x = x + self.branch(self.first(x))
        return self.head(torch.relu(self.last(x)).mean((2, 3)))
