"""Traps: ways through the code that only inputs of another size take, and that no size of the recording gives away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives.axes import larger, smaller
from engine.verification import resizing
from engine.verification.proof import Proof
from tests.engine.traps.padding import at
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

_REFUSED = "does not run where the masked one does|takes another path|differs from the masked one"


class _Buckets(nn.Module):
    """A layer for each bucket of sizes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.layers = nn.ModuleDict({str(n): nn.Conv2d(8, 8, 1) for n in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head(self.layers[f"{x.shape[-1] // 8}"](y))  # type: ignore[no-any-return]


class _Parity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.layers = nn.ModuleDict({"0": nn.Identity(), "1": nn.Conv2d(8, 8, 1)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head(self.layers[str(x.shape[-2] % 2)](y))  # type: ignore[no-any-return]


class _Batch(nn.Module):
    """A layer for each bucket of batch sizes, as compiled engines have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.layers = nn.ModuleDict({"0": nn.Conv2d(8, 8, 1), "1": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head(self.layers[str(len(x) // 2)](y))  # type: ignore[no-any-return]


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stem, self.head = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleDict({"0": nn.Linear(8, 8), "1": nn.Identity()})

    def forward(self, ids: Tensor) -> Tensor:
        y = self.stem(self.embed(ids)).relu()
        return self.head(self.layers[str(ids.shape[1] // 8)](y))  # type: ignore[no-any-return]


class _Single(nn.Module):
    """A single sample takes another way; text of a size is a read that the recording follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.single, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if f"{len(x)}" == "1":
            y = self.single(y)
        return self.head(y)  # type: ignore[no-any-return]


class _Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.long, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).relu()
        if len(f"{x.shape[1]:b}") > 4 or "1" in f"{x.shape[1]:b}"[-1]:
            y = self.long(y)
        return self.head(y)  # type: ignore[no-any-return]


class _Listed(nn.Module):
    """An order of channels out of a list, by whether the height is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def turned(self, y: Tensor) -> Tensor:
        """Return the channels in another order."""
        return y.roll(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head((torch.relu, self.turned)[x.shape[2] % 2](y))  # type: ignore[no-any-return]


class _Gotten(_Listed):
    """The same, picked in a way that no subscript shows."""

    def forward(self, x: Tensor) -> Tensor:
        function = (torch.relu, self.turned).__getitem__(x.shape[2] % 2)
        return self.head(function(self.stem(x).relu()))  # type: ignore[no-any-return]


class _Strip(nn.Module):
    """The sides of a picture as text: another order of channels for pictures that are no squares."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def wide(self, y: Tensor) -> Tensor:
        """Return the channels in another order."""
        return y.roll(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        height, width = "x".join(map(str, x.shape[-2:])).split("x")
        way = (self.wide, torch.relu)[height == width]  # out of a list, where no branch shows the other
        return self.head(way(y))  # type: ignore[no-any-return]


class _GottenStrip(_Strip):
    """The same, picked in a way that no subscript shows."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = "x".join(map(str, x.shape[-2:])).split("x")
        way = (self.wide, torch.relu).__getitem__(height == width)
        return self.head(way(self.stem(x).relu()))  # type: ignore[no-any-return]


def _ids(model: nn.Module) -> Tensor:
    return torch.arange(16).view(2, 8) % 11


def _ids_of(*shape: int) -> Any:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(torch.arange(shape[0] * shape[1]).view(shape) % 7)

    return use


def _picture(model: nn.Module) -> Tensor:
    return torch.zeros(2, 3, 8, 8, dtype=torch.float64)


def _sequence(model: nn.Module) -> Tensor:
    return torch.zeros(2, 8, 3, dtype=torch.float64)


_PICTURES = at((1, 3, 8, 8), (2, 3, 5, 7), (1, 3, 16, 16), (2, 3, 9, 8))

_SINGLES = at((2, 3, 8, 8), (1, 3, 8, 8), (1, 3, 5, 7))


def _trap(name: str, source: str, make: Callable[[], nn.Module], uses: Sequence[Use], **more: Any) -> Trap:
    example = more.pop("example", _picture)
    return Trap(name=name, source=source, make=make, example=example, uses=uses, **more)


TRAPS = [
    _trap("a layer per bucket of sizes", "StyleGAN, getattr(self, f'b{res}')", _Buckets, _PICTURES, refused=_REFUSED),
    _trap("a layer for odd sizes", "padding layers chosen by name", _Parity, _PICTURES, refused=_REFUSED),
    _trap("a layer per bucket of batches", "servers that pad to a batch size", _Batch, _SINGLES),
    _trap("a layer for single samples", "streaming next to batches", _Single, _SINGLES, shrinks=True),
    _trap(
        "a function from a list for odd sizes",
        "padding modes by parity, StyleGAN's resampling",
        _Listed,
        _PICTURES,
        refused=_REFUSED,
    ),
    _trap(
        "a function out of a list, by its method, for odd sizes",
        "padding modes by parity, StyleGAN's resampling",
        _Gotten,
        _PICTURES,
        refused=_REFUSED,
    ),
    _trap("no squares", "buckets of aspect ratios, SDXL", _Strip, _PICTURES, refused=_REFUSED),
    _trap("no squares, by a method of a list", "buckets of aspect ratios", _GottenStrip, _PICTURES, refused=_REFUSED),
    _trap(
        "a layer per bucket of tokens",
        "length buckets, tensor2tensor",
        _Tokens,
        [_ids_of(1, 8), _ids_of(2, 5), _ids_of(1, 11)],
        example=_ids,
        refused=_REFUSED,
    ),
    _trap(
        "a layer for odd numbers of steps",
        "length buckets, tensor2tensor",
        _Steps,
        at((1, 8, 3), (2, 5, 3), (1, 19, 3)),
        example=_sequence,
        refused=_REFUSED,
    ),
]


def _no_other_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Proof, "_run_resized", lambda *args: None)


def _no_odd_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resizing, "_odd_ones", lambda axes: {axis: axis.size // 2 for axis in axes})
    for name in ("_longer", "_odd_larger_ones"):
        patch.setattr(resizing, name, lambda axes: {axis: axis.size * 2 for axis in axes})


def _all_sides_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resizing, "_odd_ones", lambda axes: {axis: smaller(axis.size) | 1 for axis in axes})
    patch.setattr(resizing, "_odd_larger_ones", lambda axes: {axis: larger(axis.size) | 1 for axis in axes})


ABLATIONS = [
    Ablation("trials of other sizes", _no_other_sizes, "a function out of a list, by its method, for odd sizes"),
    Ablation("trials of odd sizes", _no_odd_sizes, "a function out of a list, by its method, for odd sizes"),
    Ablation("trials of each side by itself", _all_sides_alike, "no squares, by a method of a list"),
]
