"""Traps: calls that take another way than the first one, because of what that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.running.evaluation import State
from engine.verification.proof import Proof
from engine.verification.remains import Remains
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

_SHAPE = (2, 3, 6, 6)
_REFUSED = "does not run where the masked one does|takes another path|differs from the masked one"


def _calls(count: int = 3) -> Use:
    """Return a use that calls the network several times in a row."""

    def use(model: nn.Module) -> Any:
        generator = torch.Generator().manual_seed(1)
        noise = [torch.randn(_SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]
        with torch.no_grad():
            return [model.eval()(x) for x in noise]

    return use


class _Net(nn.Module):
    """A stem and a head; ``late`` runs from the second call on, and so does what turns the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.late, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def turned(self, y: Tensor) -> Tensor:
        """Return the channels in another order."""
        return y.roll(3, 1)

    def way(self, warm: bool) -> Callable[[Tensor], Tensor]:
        """Return what runs in the first call, or in later ones: out of a list, where no branch shows the other."""
        return (torch.relu, self.turned)[warm]


class _Flag(_Net):
    ready = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if self.ready:
            y = self.turned(y)
        self.ready = True
        return self.head(y)  # type: ignore[no-any-return]


class _Memory(_Net):
    """Features of the frame before, through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        z = y if self.memory is None else y + self.late(self.memory)
        self.memory = y.detach()
        return self.head(z)  # type: ignore[no-any-return]


class _Steps(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if self.step >= 1:
            y = self.late(y).tanh()
        self.step += 1
        return self.head(y)  # type: ignore[no-any-return]


class _History(_Net):
    """A window of frames in a list; a layer mixes them as soon as there are two."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Conv2d(16, 8, 1)
        self.frames: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        self.frames.append(y)
        if len(self.frames) > 1:
            y = self.late(torch.cat(self.frames[-2:], 1))
        return self.head(y)  # type: ignore[no-any-return]


class _Options(_Net):
    """A dictionary of options that the first call fills."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.way("warm" in self.options)(self.stem(x).relu())
        self.options["warm"] = True
        return self.head(y)  # type: ignore[no-any-return]


class _Counter(_Net):
    """Where the count of calls is a buffer, and Python reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.way(int(self.count) > 0)(self.stem(x).relu())
        self.count += 1
        return self.head(y)  # type: ignore[no-any-return]


def _counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class _Closure(_Net):
    """The state is a variable of a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.count = _counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self.count() > 1)(self.stem(x).relu()))  # type: ignore[no-any-return]


class _Cached(_Net):
    """What the first call computes is reused: the layer runs in the first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if self.cache is None:
            self.cache = self.late(y).mean((0, 2, 3), keepdim=True)
        return self.head(y + self.cache)  # type: ignore[no-any-return]


class _Running(_Net):
    """A mean over calls, which starts as the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        now = y.mean((0, 2, 3), keepdim=True)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.head(self.late(y - self.mean).relu())  # type: ignore[no-any-return]


def _trap(name: str, source: str, make: Callable[[], nn.Module], **more: Any) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(_SHAPE, dtype=torch.float64),
        uses=[_calls()],
        **more,
    )


TRAPS = [
    _trap(
        "ready from the second call on", "lazily initialised layers: if not self.initialized", _Flag, refused=_REFUSED
    ),
    _trap("a layer for the frame before", "online video networks, motion from x[t-1]", _Memory),
    _trap("a layer after warm-up", "if self.step >= self.start, in quantisers", _Steps, refused=_REFUSED),
    _trap("frames in a list", "sliding windows of streaming models", _History),
    _trap("options that a call sets", "caches by name, as of anchors in detectors", _Options, refused=_REFUSED),
    _trap("a count in a buffer that Python reads", "Glow's actnorm, initialized", _Counter, refused=_REFUSED),
    _trap("a count in a closure", "closures as state", _Closure, refused=_REFUSED),
    _trap("a layer for the first call only", "SAM, embeddings computed in advance", _Cached),
    _trap("a mean over calls", "normalisation that starts with its first batch", _Running, shrinks=True),
]


def _one_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Proof, "_run_again", lambda *args: None)


def _nothing_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Remains, "differ", lambda self: False)


def _containers_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "differs", lambda self: False)


ABLATIONS = [
    Ablation("two calls in a row are compared", _one_call, "a count in a closure"),
    Ablation("an attribute that a call sets makes it two calls", _nothing_left, "a count in a closure"),
    Ablation("what a call changes in containers makes it two calls", _containers_unseen, "options that a call sets"),
]
