"""Random convolutional networks, described by plain data so that hypothesis can shrink them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 6  # height and width of every feature map


@dataclass(frozen=True)
class Step:
    """One step: an op, which earlier feature maps it reads, and a number that chooses among variants.

    Attributes:
        op: name of a builder.
        first, second: indices into the feature maps so far, taken modulo their number.
        variant: any small number.
    """

    op: str
    first: int
    second: int
    variant: int


Made = tuple[nn.Module, Callable[..., Tensor], int]
"""(modules, function of (modules, x, y), channels that come out)"""


def _conv(x: int, y: int, v: int) -> Made:
    kernel = (1, 3, 3)[v % 3]
    mode = ("zeros", "zeros", "reflect", "replicate")[v // 3 % 4]
    out = 2 + v % 7
    conv = nn.Conv2d(x, out, kernel, padding=kernel // 2, bias=v % 2 == 0, padding_mode=mode)
    return conv, lambda m, a, b: m(a), out


def _grouped(x: int, y: int, v: int) -> Made:
    groups = next(g for g in (4, 3, 2, 1) if x % g == 0)
    out = groups * (1 + v % 3)
    conv = nn.Conv2d(x, out, 3, padding=1, groups=groups, bias=v % 2 == 0)
    return conv, lambda m, a, b: m(a), out


def _depthwise(x: int, y: int, v: int) -> Made:
    out = x * (1 + v % 2)
    return nn.Conv2d(x, out, 3, padding=v % 3 and 1 or 1, groups=x, bias=v % 2 == 0), lambda m, a, b: m(a), out


def _transposed(x: int, y: int, v: int) -> Made:
    groups = next(g for g in (2, 1) if x % g == 0) if v % 2 else 1
    out = groups * (2 + v % 3)
    return nn.ConvTranspose2d(x, out, 3, padding=1, groups=groups), lambda m, a, b: m(a), out


def _norm(x: int, y: int, v: int) -> Made:
    return nn.BatchNorm2d(x, affine=v % 4 != 0), lambda m, a, b: m(a), x


def _activation(x: int, y: int, v: int) -> Made:
    make = (nn.ReLU, nn.Sigmoid, nn.Hardswish, nn.Tanh, nn.GELU, nn.Softplus, lambda: nn.PReLU(x), nn.ELU)[v % 8]
    return make(), lambda m, a, b: m(a), x


def _in_place(x: int, y: int, v: int) -> Made:
    return nn.Identity(), lambda m, a, b: F.relu_((a * 1).add_(0.25)), x


def _matched(x: int, y: int) -> nn.Module:
    return nn.Identity() if x == y else nn.Conv2d(y, x, 1)


def _add(x: int, y: int, v: int) -> Made:
    functions = (torch.add, torch.sub, torch.maximum, lambda a, b: a / (2 + torch.tanh(b)))
    return _matched(x, y), lambda m, a, b: functions[v % 4](a, m(b)), x


def _product(x: int, y: int, v: int) -> Made:
    return _matched(x, y), lambda m, a, b: a * m(b), x


def _gate(x: int, y: int, v: int) -> Made:
    squeeze = nn.Sequential(nn.Conv2d(x, 2, 1), nn.ReLU(), nn.Conv2d(2, x, 1), nn.Sigmoid())
    return squeeze, lambda m, a, b: a * m(a.mean((2, 3), keepdim=True)), x


def _cat(x: int, y: int, v: int) -> Made:
    return nn.Identity(), lambda m, a, b: torch.cat([a, b], 1), x + y


def _halves(x: int, y: int, v: int) -> Made:
    if x % 2:
        return _activation(x, y, v)
    functions = (
        lambda a: torch.add(*a.chunk(2, 1)),
        lambda a: torch.mul(*a.split(a.shape[1] // 2, 1)),
        lambda a: F.glu(a, 1),
        lambda a: torch.stack(a.chunk(2, 1), 1).sum(1),
    )
    return nn.Identity(), lambda m, a, b: functions[v % 4](a), x // 2


def _rearrange(x: int, y: int, v: int) -> Made:
    if x % 4:
        return nn.Identity(), lambda m, a, b: a.flip(1), x
    functions = (
        lambda a: torch.channel_shuffle(a, 2),
        lambda a: F.pixel_shuffle(a, 2)[:, :, ::2, ::2].repeat(1, 4, 1, 1),
        lambda a: (
            F.max_pool2d(F.pixel_unshuffle(a, 2), 1).repeat_interleave(2, 2).repeat_interleave(2, 3)[:, : a.shape[1]]
        ),
        lambda a: a.view(a.shape[0], 2, -1, *a.shape[2:]).transpose(1, 2).flatten(1, 2),
    )
    return nn.Identity(), lambda m, a, b: functions[v % 4](a), x


def _pool(x: int, y: int, v: int) -> Made:
    functions = (
        lambda a: F.max_pool2d(a, 3, 1, 1),
        lambda a: F.avg_pool2d(a, 3, 1, 1),
        lambda a: F.avg_pool2d(a, 3, 1, 1, count_include_pad=False),
        lambda a: F.interpolate(F.adaptive_avg_pool2d(a, 3), a.shape[2:], mode="bilinear"),
        lambda a: F.pad(a, (1, 1, 1, 1))[:, :, 1:-1, 1:-1],
        lambda a: F.pad(a, (0, 0, 2, 0), value=0.5)[:, :, 2:],
        lambda a: a + a.sum((2, 3), keepdim=True) * 0.01,
    )
    return nn.Identity(), lambda m, a, b: functions[v % 7](a), x


def _pad_channels(x: int, y: int, v: int) -> Made:
    return nn.Identity(), lambda m, a, b: F.pad(a, (0, 0, 0, 0, 1, v % 2)), x + 1 + v % 2


def _cut(x: int, y: int, v: int) -> Made:
    if x < 3:
        return _activation(x, y, v)
    functions = (lambda a: a[:, :2], lambda a: a[:, -2:], lambda a: a.split([2, x - 2], 1)[0])
    return nn.Identity(), lambda m, a, b: functions[v % 3](a), 2


def _twice(x: int, y: int, v: int) -> Made:
    conv = nn.Conv2d(x, x, 3, padding=1, bias=v % 2 == 0)
    return conv, lambda m, a, b: m(torch.relu(m(a))), x


def _write(x: int, y: int, v: int) -> Made:
    def write(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a = a * 1
        if v % 2:
            a[:, :, 1:3].sigmoid_()
        else:
            a[:, : a.shape[1] // 2] = 0.5
        return a

    return nn.Identity(), write, x


BUILDERS: dict[str, Callable[[int, int, int], Made]] = {
    "activation": _activation,
    "add": _add,
    "cat": _cat,
    "conv": _conv,
    "cut": _cut,
    "depthwise": _depthwise,
    "gate": _gate,
    "grouped": _grouped,
    "halves": _halves,
    "in place": _in_place,
    "norm": _norm,
    "pad channels": _pad_channels,
    "pool": _pool,
    "product": _product,
    "rearrange": _rearrange,
    "transposed": _transposed,
    "twice": _twice,
    "write": _write,
}


class RandomNet(nn.Module):
    """A network that runs steps, each on earlier feature maps, and puts a head on the last ones.

    Args:
        steps: what to do.
        flat: whether the head flattens positions into channels instead of averaging over them.
    """

    def __init__(self, steps: list[Step], flat: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.parts = nn.ModuleList()
        self.steps = steps
        self.functions = []
        self.flat = flat
        channels = [4]
        for step in steps:
            x, y = channels[step.first % len(channels)], channels[step.second % len(channels)]
            part, function, out = BUILDERS[step.op](x, y, step.variant)
            self.parts.append(part)
            self.functions.append(function)
            channels.append(out)
        self.head = nn.Linear(channels[-1] * (SIZE * SIZE if flat else 1) + channels[len(channels) // 2], 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, shape (batch, 3)."""
        maps = [self.stem(x)]
        for step, part, function in zip(self.steps, self.parts, self.functions, strict=True):
            maps.append(function(part, maps[step.first % len(maps)], maps[step.second % len(maps)]))
        last = maps[-1].flatten(1) if self.flat else maps[-1].mean((2, 3))
        scores: Tensor = self.head(torch.cat([last, maps[len(maps) // 2].amax((2, 3))], 1))
        return scores
