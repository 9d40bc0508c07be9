"""Attention and views in many words, and helpers for networks over tokens, that several test files share."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import engine
from engine.surgery.edits import Pin
from engine.surgery.kinds.pins import Pinned


def tokens(batch: int = 2, count: int = 4, seed: int = 0) -> Tensor:
    """Random input of shape (batch, count, 5)."""
    return torch.randn(batch, count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def without_heads(layer: nn.Module, closed: Iterable[int], heads: int = 4) -> dict[str, Tensor]:
    """Mask queries, keys and values of some heads in a fused projection."""
    mask = torch.ones(3, heads, layer.weight.shape[0] // 3 // heads)
    mask[:, list(closed)] = 0
    rows = mask.reshape(-1)
    columns = rows.view(-1, *[1] * (layer.weight.ndim - 1))
    return {"weight": columns.expand(layer.weight.shape).clone(), "bias": rows}


def pins_of(plan: engine.Plan) -> tuple[Pin, ...]:
    """All pins, with the names of their modules."""
    return tuple(dataclasses.replace(pin, module=e.module) for e in plan.of(Pinned) for pin in e.pins)


def stored(plan: engine.Plan) -> engine.Plan:
    """Through a file that is read with weights_only."""
    file = io.BytesIO()
    torch.save(plan.state_dict(), file)
    file.seek(0)
    return engine.Plan.from_state_dict(torch.load(file, weights_only=True))


class Attention(nn.Module):
    """Self-attention whose sizes are written as most authors write them: ``c`` is the width of the tokens."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, (batch, tokens, width)."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class Rewritten(Attention):
    """The same function in other words."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = (qkv[0] @ qkv[1].transpose(-2, -1) * qkv.shape[-1] ** -0.5).softmax(-1) @ qkv[2]
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class ByBatch(Attention):
    """Heads next to the batch, in one dimension: the number that splits them off follows the batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, n * self.heads, t, c // self.heads).unbind(0)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.view(n, self.heads, t, -1).transpose(1, 2).flatten(2))


class Chosen(Attention):
    """Which of its methods runs is chosen when it is made."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__(width, heads)
        self.forward = self.attend

    def attend(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))


def split_heads(x: Tensor, heads: int, width: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values, (batch, heads, tokens, width)."""
    return x.reshape(x.shape[0], x.shape[1], 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)


def attended(x: Tensor, heads: int, width: int) -> Tensor:
    """Return what heads put out, (batch, heads, tokens, width)."""
    q, k, v = split_heads(x, heads, width)
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


class ByFunction(Attention):
    """The heads are split by a function of the file."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = split_heads(self.qkv(x), self.heads, x.shape[2] // self.heads)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def heads_of(x: Tensor, sizes: list[int]) -> Tensor:
    """Return queries, keys and values, (3, batch, heads, tokens, width)."""
    return x.reshape(x.shape[0], x.shape[1], 3, sizes[0], sizes[1]).permute(2, 0, 3, 1, 4)


class ByTypedFunction(Attention):
    """The heads are split by a function whose sizes come as a list: TorchScript takes them for a tensor otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        qkv = heads_of(self.qkv(x), [self.heads, x.shape[2] // self.heads])
        y = (qkv[0] @ qkv[1].transpose(-2, -1)).softmax(-1) @ qkv[2]
        return self.out(y.transpose(1, 2).flatten(2))


class ByFunctions(Attention):
    """The heads are split by a function that another function of the file calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        return self.out(attended(self.qkv(x), self.heads, x.shape[2] // self.heads).transpose(1, 2).flatten(2))


class ByAttribute(Attention):
    """The heads are split by a function that is an attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.split = split_heads

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = self.split(self.qkv(x), self.heads, x.shape[2] // self.heads)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class BySuper(Attention):
    """Calls the forward of its base."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        return 2 * super().forward(x)


class ByBase(Attention):
    """Calls the forward of its base, by the base's name."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        return 2 * Attention.forward(self, x)


class ByMethod(Attention):
    """Splits heads in a method of its own, with defaults and keywords."""

    def split(self, x: Tensor, width: int = 2, *, parts: int = 3) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        n, t = x.shape[:2]
        return torch.reshape(x, (n, t, parts, self.heads, width)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = self.split(self.qkv(x))
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class WithClassDefault(Attention):
    """A default that is a name of the class body."""

    parts = 3

    def forward(self, x: Tensor, parts: int = parts) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, parts, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class WithPrivateName(Attention):
    """An attribute whose name Python changes inside of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.__parts = 3

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, self.__parts, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class WithText(Attention):
    """Text in the code that starts further left than the code does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        assert c % self.heads == 0, """
the width is a multiple of the heads"""
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


def counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator that wraps."""

    @functools.wraps(function)
    def wrapper(self: Attention, x: Tensor) -> Tensor:
        return function(self, x)

    return wrapper


class Decorated(Attention):
    """The method is hidden behind another function."""

    @counted
    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Inner(Attention):
    """The function with the sizes is made in the forward, and sees its names."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape

        def split(y: Tensor) -> Tensor:
            return y.reshape(n, t, 3, self.heads, c // self.heads)

        q, k, v = split(self.qkv(x)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Unpacked(Attention):
    """Sizes in front of the one that changes are unpacked."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, x.shape[2] // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Named(Attention):
    """Sizes are passed by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        q, k, v = torch.reshape(self.qkv(x), shape=(n, t, 3, self.heads, c // self.heads)).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Large(nn.Module):
    """Attention over positions, which pools large images first and then splits heads in another line."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.stem, self.qkv = 4, nn.Conv2d(3, 8, 1), nn.Conv2d(8, 24, 1)
        self.out, self.head = nn.Conv2d(8, 6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x)
        n, c, h, w = x.shape
        qkv = self.qkv(x)
        if h > 8:
            small = torch.nn.functional.avg_pool2d(qkv, 2)
            q, k, v = small.reshape(n, 3, self.heads, c // self.heads, h * w // 4).transpose(3, 4).unbind(1)
        else:
            q, k, v = qkv.reshape(n, 3, self.heads, c // self.heads, h * w).transpose(3, 4).unbind(1)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.head(torch.relu(self.out(y.transpose(2, 3).flatten(1, 2)[..., None])).mean((2, 3)))


class ScaledByWidth(Attention):
    """Scores are scaled by a width that is computed from that of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Factored(nn.Module):
    """A stem whose channels are multiplied by a number that is computed from how many they are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head, self.kind = nn.Conv2d(3, 8, 1), nn.Linear(8, 2), kind

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x)
        if self.kind == "right":
            x = x * x.shape[1] ** -0.5
        elif self.kind == "left":
            x = x.shape[1] ** -0.5 * (1 + x * x)
        elif self.kind == "divided":
            x = x / math.sqrt(x.size(1))
        elif self.kind == "dividend":
            x = x.shape[1] / (1 + x * x)
        elif self.kind == "method":
            x = x.mul(x.shape[1] / 3)
        elif self.kind == "function":
            x = torch.div(x, x.shape[1])
        elif self.kind == "in place":
            x *= x.shape[1] ** -0.5
        else:
            x = (x * x) ** (1 / x.shape[1])
        return self.head(x.mean((2, 3)))


class Sized(nn.Module):
    """A stem whose channels are viewed by some size, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head, self.kind, self.width = nn.Conv2d(3, 8, 1), nn.Linear(8, 2), kind, 8

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        view = {"literal": self._literal, "batch": self._batch, "resolution": self._resolution}.get(
            self.kind, self._own
        )
        return self.head(view(self.stem(x)).mean(2))

    def _literal(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 8, -1)

    def _batch(self, x: Tensor) -> Tensor:
        return x.view(-1, x.shape[0] * 4, x.shape[2] * x.shape[3])

    def _resolution(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[2] * 2, -1)

    def _own(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.width, -1)


class Pieces(nn.Module):
    """A stem whose channels are split at widths that were computed beforehand, ``again`` for a second stem."""

    def __init__(self, widths: list[int] | tuple[int, ...], again: bool = False) -> None:
        super().__init__()
        self.stem, self.other = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1) if again else None
        self.head, self.widths = nn.Linear(sum(widths) * (2 if again else 1), 2), widths

    def pieces(self, x: Tensor) -> Tensor:
        """Return channels, each piece by a function of its own."""
        first, second = torch.split(x, self.widths, 1)
        return torch.cat([first.tanh(), second.sigmoid()], 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        found = [self.pieces(self.stem(x))]
        if self.other is not None:
            found.append(self.pieces(self.other(x)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


class Viewed(nn.Module):
    """One call of each function whose sizes can be pinned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head, self.kind, self.width = nn.Conv2d(3, 8, 1), nn.Linear(8, 2), kind, 8

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        gate, x = torch.sigmoid(x.mean((1, 2, 3)))[:, None], self.stem(x)
        n, h, w = x.shape[0], x.shape[2], x.shape[3]
        if self.kind == "view tuple":
            x = x.view((n, self.width, h * w)).mean(2)
        elif self.kind == "torch.reshape list":
            x = torch.reshape(x, [n, self.width, h * w]).mean(2)
        elif self.kind == "unflatten":
            x = x.mean((2, 3)).unflatten(1, (self.width, 1)).flatten(1)
        elif self.kind == "torch.unflatten":
            x = torch.unflatten(x.mean((2, 3)), 1, (self.width, 1)).flatten(1)
        elif self.kind == "expand":
            x = x.mean((2, 3)) * gate.expand(n, self.width)
        elif self.kind == "split":
            x = torch.cat([part.neg() for part in x.split(self.width // 2, 1)], 1).mean((2, 3))
        return self.head(x)
