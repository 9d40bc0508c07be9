"""Traps: numbers that enter an op from somewhere that the analysis does not follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.running import provenance
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS", "Net", "called", "noise", "trap_on_rows"]


class Net(nn.Module):
    """Two layers, and features between them that are not zero where a channel is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        """Return what stands between the layers."""
        return torch.relu(self.enter(x)) + 0.5


class _Keyword(Net):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.leave(self.features(x) * options.get("scale", 1.0))  # type: ignore[no-any-return]


class _Key(Net):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.leave(self.features(batch["x"]) * batch.get("scale", 1.0))  # type: ignore[no-any-return]


class _Caught(Net):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        try:
            scale: Any = batch["scale"]
        except KeyError:
            scale = 1.0
        return self.leave(self.features(batch["x"]) * scale)  # type: ignore[no-any-return]


class _Defaults(Net):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        options = {"scale": 1.0, **options}
        return self.leave(self.features(x) * options["scale"])  # type: ignore[no-any-return]


class _Popped(Net):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        shift = options.pop("shift", 0)
        return self.leave(self.features(x) + shift)  # type: ignore[no-any-return]


class _Length(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * (1.0 + (len(x) > 4)))  # type: ignore[no-any-return]


class _Quotient(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * (1 + len(x) // 10))  # type: ignore[no-any-return]


class _Bytes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * (1.0 + (x.nbytes > 200)))  # type: ignore[no-any-return]


class _Counted(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * (1.0 + sum(1 for _ in x) // 4))  # type: ignore[no-any-return]


class _Root(Net):
    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[0] ** 0.5)
        return self.leave(self.features(x) * side)  # type: ignore[no-any-return]


class _Gradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * (1.0 + torch.is_grad_enabled()))  # type: ignore[no-any-return]


class _Unset(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * (self.scale or 1.0))  # type: ignore[no-any-return]

    def set_scale(self, scale: float) -> None:
        """Scale features from now on."""
        self.scale = scale


class _Stored(Net):
    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.features(x) * self.options.get("scale", 1.0))  # type: ignore[no-any-return]


class _Enclosing(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        def scaled(features: Tensor) -> Tensor:
            return features * scale

        return self.leave(scaled(self.features(x)))  # type: ignore[no-any-return]


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.enter(x)) + 0.5


class _Padding(_Images):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return F.conv2d(self.features(x), self.leave.weight, self.leave.bias, padding=options.get("padding", 0))


class _Pool(_Images):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.leave(F.max_pool2d(self.features(x), options.get("pool", 2)))  # type: ignore[no-any-return]


class _PooledPadding(_Images):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        pooled = F.avg_pool2d(self.features(x), 2, padding=options.get("padding", 0))
        return self.leave(pooled)  # type: ignore[no-any-return]


class _LateRoot(_Images):
    """Has no such dimension any more where the number is used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        side = int(h.shape[3] ** 0.5)
        h = h.flatten(2).mean(2)
        return F.linear(h / side, self.leave.weight.sum((2, 3)), self.leave.bias)


def _half(size: int) -> int:
    return size // 2


class _Shift(_Images):
    def forward(self, x: Tensor) -> Tensor:
        shift = 0 if _half(x.shape[2]) <= 3 else 1
        return self.leave(torch.roll(self.features(x), shift, 2))  # type: ignore[no-any-return]


class _Padded(_Images):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        border = options.get("border", 0)
        return self.leave(F.pad(self.features(x), (border, border)))  # type: ignore[no-any-return]


def _image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def noise(rows: int) -> Tensor:
    """Return rows of four numbers."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def called(*args: Any, **kwargs: Any) -> Use:
    """Return a use that calls the network once, in eval mode."""

    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(*args, **kwargs)

    return use


def trap_on_rows(name: str, source: str, make: Callable[[], nn.Module], *uses: Use) -> Trap:
    """Return a trap whose example has two rows, and that is called with three and in other ways."""
    return Trap(name, source, make, lambda model: noise(2), [called(noise(3)), *uses])


def _with_gradients(model: nn.Module) -> Any:
    return model.eval()(noise(3))


def _scaled(model: Any) -> Any:
    model.set_scale(0.3)
    return called(noise(3))(model)


def _with_option(model: Any) -> Any:
    model.options["scale"] = 0.3
    return called(noise(3))(model)


def _trap(name: str, source: str, make: Callable[[], nn.Module], example: Any, *uses: Use, **options: Any) -> Trap:
    return Trap(name, source, make, lambda model: example, uses, **{"shrinks": "repaired", **options})


_BATCH = ({"x": noise(2)},)
_SCALED = {"x": noise(3), "scale": torch.tensor(0.3, dtype=torch.float64)}

TRAPS = [
    _trap("an option with a default", "kwargs.get('scale', 1.0)", _Keyword, noise(2), called(noise(3), scale=0.3)),
    _trap("a key with a default", "batch.get('weight', 1.0)", _Key, _BATCH, called(_SCALED)),
    _trap("a key that is missed", "try: batch['scale'] except KeyError", _Caught, _BATCH, called(_SCALED)),
    _trap("defaults under options", "{**defaults, **kwargs}", _Defaults, noise(2), called(noise(3), scale=0.3)),
    _trap("an option that is popped", "kwargs.pop('shift', 0)", _Popped, noise(2), called(noise(3), shift=0.3)),
    _trap("a factor by a length", "1.0 + (len(x) > 4)", _Length, noise(2), called(noise(9))),
    _trap("a quotient of a length", "1 + len(x) // 10", _Quotient, noise(2), called(noise(19))),
    _trap("a factor by the bytes of a tensor", "x.nbytes > limit", _Bytes, noise(2), called(noise(19))),
    _trap("a factor by counting", "sum(1 for _ in x)", _Counted, noise(2), called(noise(19))),
    _trap("a root of a size as a factor", "int(n ** 0.5)", _Root, noise(2), called(noise(19))),
    _trap("a factor by gradients", "1.0 + torch.is_grad_enabled()", _Gradients, noise(2), _with_gradients),
    _trap("an attribute or a default", "self.scale or 1.0", _Unset, noise(2), _scaled),
    _trap("an option in an attribute", "self.options.get('scale', 1.0)", _Stored, noise(2), _with_option),
    _trap(
        "a padding from an option",
        "padding=kwargs.get('padding', 0)",
        _Padding,
        _image(2, 3, 6, 6),
        called(_image(3, 3, 7, 7), padding=1),
    ),
    _trap(
        "a pool by an option",
        "max_pool2d(x, kwargs.get('pool', 2))",
        _Pool,
        _image(2, 3, 8, 8),
        called(_image(3, 3, 12, 12), pool=3),
    ),
    _trap(
        "a padding of a mean by an option",
        "avg_pool2d(x, 2, padding=kwargs.get('padding', 0))",
        _PooledPadding,
        _image(2, 3, 8, 8),
        called(_image(3, 3, 8, 8), padding=1),
    ),
    _trap(
        "a root of a size that is gone",
        "int(h.shape[3] ** 0.5) before a flatten",
        _LateRoot,
        _image(2, 3, 6, 6),
        called(_image(3, 3, 9, 9)),
        shrinks=False,
    ),
    _trap(
        "a shift by a function of a size",
        "0 if half(h) <= 3 else 1",
        _Shift,
        _image(2, 3, 6, 6),
        called(_image(3, 3, 9, 9)),
        shrinks=False,
    ),
    _trap(
        "a border from an option",
        "pad(x, (border, border))",
        _Padded,
        _image(2, 3, 6, 6),
        called(_image(3, 3, 6, 6), border=2),
        shrinks=False,
    ),
    _trap("a number around a function", "closures", _Enclosing, noise(2), called(noise(3), scale=0.3)),
]


def _all_fixed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(provenance, "unfixed_numbers", lambda numbers, frame, function: [])


ABLATIONS = [
    Ablation("numbers that the source does not fix vary", _all_fixed, "an option with a default"),
]
