"""Blocks that do something else while training, with gradients, or on the way back."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.random_traps.blocks import Block, axis, block, layer, positions


@block()
class AuxiliaryHead(Block):
    """A head for train mode only, added, returned or left on the module."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.aux, self.how = nn.Linear(width, 3), draw.choice(["return", "leave", "add"])
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        """Return the input, with something more while training."""
        if not self.training:
            return x * 1.0
        aux = self.aux(x.mean(positions(x)))
        if self.how == "return":
            return x * 1.0, aux
        if self.how == "leave":
            self.aux_loss = aux.square().mean()
            return x * 1.0
        return x + aux.square().mean()


@block()
class Noise(Block):
    """Noise while training, one number for each entry or sample."""

    noisy = True

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.how = draw.choice(["like", "dropout", "function", "mask"])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        """Return noisy features."""
        if self.how == "dropout":
            return self.drop(x)
        if self.how == "function":
            return F.dropout(x, 0.2, self.training)
        if not self.training:
            return x
        return x + torch.randn_like(x) * 0.1 if self.how == "like" else x * (torch.rand_like(x) > 0.2)


@block()
class StochasticDepth(Block):
    """A branch that is dropped for samples, or for the batch by Python."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.branch, self.by = layer(kind, width, width), draw.choice(["sample", "batch", "python"])

    def forward(self, x: Tensor) -> Any:
        """Return the sum, or the input."""
        if not self.training:
            return x + 0.8 * self.branch(x)
        if self.by == "sample":
            return x + self.branch(x) * x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(0.8)
        dropped = torch.rand(1).item() < 0.2 if self.by == "batch" else random.random() < 0.2
        return x if dropped else x + self.branch(x)


@block()
class TrainScale(Block):
    """Another scale while training."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.gain = nn.Parameter(torch.ones(()))
        self.branch = layer(kind, width, width)

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        return self.branch(x).tanh() * (self.gain * 2 if self.training else 0.5)


@block()
class WithGradients(Block):
    """Another layer where gradients are on, a checkpoint while training."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.more = layer(kind, width, width), layer(kind, width, width)
        self.how = draw.choice(["grad", "checkpoint", "requires", "detach"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        if self.how == "checkpoint" and self.training:
            return checkpoint(self.body, x, use_reentrant=False)
        y = self.body(x)
        if self.how == "grad" and torch.is_grad_enabled():
            return y + self.more(x)
        if self.how == "requires" and y.requires_grad:
            return y * 1.0
        return y + self.more(x.detach()) if self.how == "detach" else y


@block("image")
class FrozenNorm(Block):
    """A norm that stays in eval mode."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.conv, self.norm, self.out = nn.Conv2d(width, 6, 1), nn.BatchNorm2d(6), 6

    def train(self, mode: bool = True) -> FrozenNorm:
        """Set the mode of all but the norm."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        """Return normalised features."""
        return self.norm(self.conv(x)).relu()


@block("image")
class TrackedNorm(Block):
    """Norms without running statistics, of other momenta, or by function."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.conv, self.out, self.how = nn.Conv2d(width, 6, 1), 6, draw.choice(["batch", "cumulative", "function"])
        self.norm = nn.BatchNorm2d(6, track_running_stats=self.how != "batch", momentum=None)

    def forward(self, x: Tensor) -> Any:
        """Return normalised features."""
        y = self.conv(x)
        if self.how == "function":
            n = self.norm
            return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, self.training, 0.1, n.eps)
        return self.norm(y).sigmoid()


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return whole eighths."""
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient."""
        return gradient


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """Return the input."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Return the gradient, reversed."""
        return -ctx.weight * gradient, None


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        ctx.channels = x.shape[1]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return it over the number of channels."""
        return gradient / ctx.channels


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x sigmoid(x)."""
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return its gradient."""
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s * (1 + x * (1 - s)))


class _Binary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return signs times the mean size."""
        ctx.save_for_backward(x)
        return x.sign() * x.abs().mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient where the input is small."""
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


@block()
class OwnBackward(Block):
    """A function with a backward of its own."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        self.function = draw.choice([_Straight, _Counting, _Swish, _Binary, _Reversed])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.body(x)
        return self.function.apply(y, 0.3) if self.function is _Reversed else self.function.apply(y)


def _double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def _shift(module: nn.Module, args: Any) -> Any:
    return (args[0] + 0.25,)


def _centre(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out - out.mean(axis(out), keepdim=True)


@block()
class Hooked(Block):
    """A layer with hooks: on the way in, out, and back."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        how = draw.choice(["out", "in", "centre", "keep", "back", "rows"])
        if how in ("out", "centre"):
            self.body.register_forward_hook(_double if how == "out" else _centre)
        elif how == "in":
            self.body.register_forward_pre_hook(_shift)
        elif how == "keep":
            self.body.register_forward_hook(_keep)
        self.back = how == "back"
        if how == "rows":
            self.body.weight.register_hook(_half)

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.body(x)
        if self.back and y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.shape[1])
        return y.relu()


def _keep(module: Any, args: Any, out: Tensor) -> None:
    module.last_output = out.detach()


def _half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


@block()
class Converted(Block):
    """Computes in another dtype and comes back."""

    tolerance = 1e-4

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.how = draw.choice(["float", "to", "type", "whole"])

    def forward(self, x: Tensor) -> Any:
        """Return features of the input's dtype."""
        if self.how == "float":
            return x.float().sigmoid().to(x.dtype)
        if self.how == "to":
            return x.to(torch.float32).square().add(0.5).to(x)
        if self.how == "type":
            return (x.type(torch.float32) * 3).tanh().type_as(x)
        return (x * 4).floor().long().clamp(-8, 8).to(x.dtype) / 4
