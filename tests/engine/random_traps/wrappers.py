"""Blocks around other blocks: called twice, under a condition, by a teacher, on parts of the input."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.random_traps.blocks import BLOCKS, Block, axis, block, layer, positions

__all__ = ["Wrapper"]


class Wrapper(Block):
    """Holds another block, and returns tensors only.

    Attributes:
        inner: the other block.
        fit: brings its channels to the width of the input.
    """

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        simple = [cls for cls in BLOCKS[kind] if not issubclass(cls, Wrapper)]
        self.inner = draw.choice(simple)(kind, width, draw)
        self.fit = layer(kind, self.inner.out, width)

    def only(self, x: Tensor) -> Tensor:
        """Return the inner block's features, of the input's width."""
        y = self.inner(x)
        return self.fit(y[0] if isinstance(y, tuple) else y)


def _resized(y: Tensor, x: Tensor) -> Tensor:
    """Return features of the positions of another tensor."""
    if y.shape == x.shape:
        return y
    if y.ndim == 4:
        return F.interpolate(y, x.shape[2:], mode="nearest")
    return F.interpolate(y.mT, x.shape[1], mode="nearest").mT


@block()
class Skipped(Wrapper):
    """The input is added."""

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        return x + _resized(self.only(x), x)


@block()
class CalledTwice(Wrapper):
    """The same block on two inputs, with what it keeps between the calls."""

    def forward(self, x: Tensor) -> Any:
        """Return the difference."""
        return self.only(x) - 0.5 * self.only(x.flip(0))


@block()
class Levels(Wrapper):
    """The same block at two resolutions (feature pyramid)."""

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        small = F.avg_pool2d(x, 2, ceil_mode=True) if x.ndim == 4 else x[:, ::2]
        return _resized(self.only(small), x) + _resized(self.only(x), x)


@block()
class Sometimes(Wrapper):
    """Runs under a condition."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.when = draw.choice(["training", "odd", "data", "single", "second", "evaluating"])
        self.times = 0

    def _runs(self, x: Tensor) -> bool:
        if self.when == "training":
            return self.training
        if self.when == "odd":
            return x.shape[2 if x.ndim == 4 else 1] % 2 == 1
        if self.when == "data":
            return bool(x.detach().mean() > 0.2)
        if self.when == "single":
            return len(x) == 1
        if self.when == "second":
            self.times += 1
            return self.times > 1
        return not self.training

    def forward(self, x: Tensor) -> Any:
        """Return features of the block, or the input."""
        return self.only(x) if self._runs(x) else x.tanh()


@block()
class Teacher(Wrapper):
    """A copy whose weights follow those of the block while training."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.teacher = copy.deepcopy(self.fit).requires_grad_(False)
        self.pre = layer(kind, width, self.inner.out)
        self.always = draw.random() < 0.5

    @torch.no_grad()
    def _follow(self) -> None:
        for mine, other in zip(self.teacher.parameters(), self.fit.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)

    def forward(self, x: Tensor) -> Any:
        """Return features, and the distance to the teacher's."""
        y = self.inner(x)
        y = y[0] if isinstance(y, tuple) else y
        student = self.fit(y)
        if self.training or self.always:
            self._follow()
        with torch.no_grad():
            target = self.teacher(y)
        return student, (student - target).square().mean()


@block()
class WithoutGradients(Wrapper):
    """A frozen block."""

    def forward(self, x: Tensor) -> Any:
        """Return the input beside frozen features."""
        with torch.no_grad():
            y = self.only(x)
        return y + x.mean(positions(x), keepdim=True)


@block()
class Checkpointed(Wrapper):
    """Computes again on the way back."""

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        if self.training and x.requires_grad:
            return checkpoint(self.only, x, use_reentrant=False)
        return self.only(x)


@block()
class SplitChannels(Wrapper):
    """Half of the channels bypass the block (CSPNet, ShuffleNet)."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, 4, draw)
        self.enter, self.out, self.shuffles = layer(kind, width, 8), 8, draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        """Return both halves."""
        a, b = self.enter(x).split(4, axis(x))
        y = torch.cat([a, _resized(self.only(b), b)], axis(x))
        if self.shuffles:
            y = y.unflatten(axis(y), (2, 4)).transpose(axis(y), axis(y) + 1).flatten(axis(y), axis(y) + 1)
        return y


@block()
class PerSample(Wrapper):
    """Runs the block on each sample by itself."""

    def forward(self, x: Tensor) -> Any:
        """Return features of all samples."""
        return torch.cat([self.only(sample) for sample in x.split(1)])


@block()
class Ensemble(Wrapper):
    """Views of the input are stacked on the batch."""

    def forward(self, x: Tensor) -> Any:
        """Return the mean over views."""
        y = self.only(torch.cat([x, x.flip(-1 if x.ndim == 4 else 1)]))
        first, second = y.chunk(2)
        return (first + second) / 2


@block()
class Iterated(Wrapper):
    """Iterates until it stays the same, or for some steps (deep equilibrium)."""

    def forward(self, x: Tensor) -> Any:
        """Return the last iterate."""
        z = torch.zeros_like(x)
        for _ in range(3):
            new = (_resized(self.only(z + x), x) * 0.3).tanh()
            if (new - z).detach().norm() < 1e-2:
                break
            z = new
        return z


@block()
class OtherMode(Wrapper):
    """The block is in eval mode whatever the network's is."""

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        before = self.inner.training
        self.inner.eval()
        y = self.only(x)
        self.inner.train(before)
        return y


@block()
class Memorised(Wrapper):
    """The features of the last batch of the same size are blended in."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.recent: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        """Return blended features."""
        y = self.only(x)
        key = tuple(x.shape)
        blended = y if key not in self.recent else 0.5 * (y + self.recent[key])
        self.recent[key] = y.detach()
        return blended


@block()
class ByList(Wrapper):
    """A chain in a list, with an index that stops it."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.chain = nn.ModuleList([layer(kind, width, width) for _ in range(3)])
        self.depth = draw.choice([1, 2, 3])

    def forward(self, x: Tensor) -> Any:
        """Return features after some layers."""
        for part in self.chain[: self.depth]:
            x = part(x).relu()
        return self.only(x)

    def set_depth(self, depth: int) -> None:
        """Let more layers run."""
        self.depth = depth

    def later(self) -> None:
        """Let all layers run."""
        self.set_depth(3)
