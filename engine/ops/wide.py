"""Norms whose statistics span channels, after some of the channels are gone.

Mean and variance are those of the full width: what was removed was a constant (mostly zero) there, so it is put back
for the length of the norm and cut off again. That is exact for any ``eps``, in train mode too, and keeps the dtype
rules of the plain norm. The module object stays; its class is exchanged for a subclass with the same parameters and
state-dict keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import PlanError
from engine.exchange import derived, moved

__all__ = ["Widening", "can_widen", "chained", "widen"]


@dataclass(frozen=True, eq=False)
class Widening:
    """A norm that lost channels.

    Attributes:
        module: its name.
        size: channels that the statistics span.
        kept: channels that are left.
        fill: constants of the removed channels, ``(size - kept,)``, or None where all are zero.
    """

    module: str
    size: int
    kept: int
    fill: Tensor | None

    def state_dict(self) -> dict[str, Any]:
        """Return it as primitives and tensors."""
        return {"module": self.module, "size": self.size, "kept": self.kept, "fill": self.fill}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Widening:
        """Read what `state_dict` wrote."""
        fill = state["fill"]
        return cls(
            str(state["module"]), int(state["size"]), int(state["kept"]), None if fill is None else fill.double()
        )


class FullWidth(tuple[int, ...]):
    """``normalized_shape`` of a norm that lost channels: the sizes that are left, and what the statistics span."""

    size: int
    fill: Tensor | None

    @classmethod
    def of(cls, kept: int, size: int, fill: Tensor | None) -> FullWidth:
        """Return the shape ``(kept,)`` of a norm over ``size`` channels."""
        self = cls((kept,))
        self.size, self.fill = size, fill
        return self


def _functional(size: int, with_fill: bool) -> ModuleType:
    """Return `torch.nn.functional` with norms over ``size`` channels of which some were removed.

    Without constants to fill in they are written in what TorchScript reads.
    """

    norm: Any = ModuleType("norm")  # TorchScript takes numbers from modules, and not from closures
    norm.size = size

    def layer_norm(
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        kept, missing = input.shape[-1], norm.size - input.shape[-1]
        if weight is not None:
            weight = F.pad(weight, [0, missing])
        if bias is not None:
            bias = F.pad(bias, [0, missing])
        return F.layer_norm(F.pad(input, [0, missing]), [norm.size], weight, bias, eps)[..., :kept]

    def rms_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        kept, missing = input.shape[-1], norm.size - input.shape[-1]
        if weight is not None:
            weight = F.pad(weight, [0, missing])
        return F.rms_norm(F.pad(input, [0, missing]), [norm.size], weight, eps)[..., :kept]

    found = ModuleType(F.__name__)
    vars(found).update(vars(F))
    found.layer_norm = _filling(F.layer_norm) if with_fill else layer_norm  # type: ignore[attr-defined]
    found.rms_norm = _filling(F.rms_norm) if with_fill else rms_norm  # type: ignore[attr-defined]
    return found


def _filling(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a functional norm over the last dimension that puts constants back for its statistics."""

    def wide(x: Tensor, shape: FullWidth, *parameters: Any, **named: Any) -> Tensor:
        assert shape.fill is not None
        missing = shape.size - x.shape[-1]

        def padded(item: Any) -> Any:
            return F.pad(item, (0, missing)) if isinstance(item, Tensor) else item

        full = torch.cat([x, shape.fill.to(x).expand(*x.shape[:-1], missing)], -1)
        given = {name: padded(p) for name, p in named.items()}
        return norm(full, (shape.size,), *map(padded, parameters), **given)[..., : x.shape[-1]]

    return wide


def can_widen(cls: Any) -> bool:
    """Whether a module class calls a spanning norm as ``F.layer_norm(x, self.normalized_shape, …)`` in its forward."""
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__closure__ is not None or not issubclass(cls, _NORMS):
        return False
    names = set(forward.__code__.co_names)
    through = any(forward.__globals__.get(n) is F for n in names)
    return through and bool(names & {"layer_norm", "rms_norm"}) and "normalized_shape" in names


_NORMS = (nn.LayerNorm, nn.RMSNorm)


@functools.cache
def _wide_class(cls: Hashable, size: int, with_fill: bool) -> type[nn.Module]:
    assert isinstance(cls, type) and issubclass(cls, nn.Module)
    forward = cls.forward
    assert isinstance(forward, FunctionType)
    names = {n: _functional(size, with_fill) for n, v in forward.__globals__.items() if v is F}
    made = moved(forward, f"{forward.__qualname__}_{size}{'_filled' * with_fill}", names)
    return derived(cls, {"forward": made}, _wide_class, size, with_fill)  # type: ignore[arg-type]


def chained(earlier: Iterable[Widening], later: Iterable[Widening]) -> tuple[Widening, ...]:
    """Return the norms of two compactions as those of one that does both."""
    found = {norm.module: norm for norm in earlier}
    for norm in later:
        first = found.get(norm.module)
        found[norm.module] = (
            norm if first is None else Widening(norm.module, first.size, norm.kept, _fills(first, norm))
        )
    return tuple(found.values())


def _fills(first: Widening, last: Widening) -> Tensor | None:
    """Constants of all that two compactions removed; statistics do not ask for their order."""
    if first.fill is None and last.fill is None:
        return None
    parts = [torch.zeros(n.size - n.kept, dtype=torch.float64) if n.fill is None else n.fill for n in (first, last)]
    return torch.cat(parts)


def widen(module: nn.Module, widening: Widening) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what makes a norm that lost channels span its full width, and what takes it back.

    Raises:
        PlanError: where the module is no norm that can.
    """
    kept = widening.kept
    spans = tuple(getattr(module, "normalized_shape", ())) == (widening.size,)
    if not can_widen(type(module)) or not spans or not 0 < kept < widening.size:
        raise PlanError(f"{widening.module!r} ({type(module).__name__}) is no norm over {widening.size} channels.")
    if widening.fill is not None and widening.fill.shape != (widening.size - kept,):
        raise PlanError(f"The constants of {widening.module!r} do not fit: {tuple(widening.fill.shape)}.")
    old_class, old_shape = type(module), vars(module)["normalized_shape"]
    new_class = _wide_class(old_class, widening.size, widening.fill is not None)  # type: ignore[arg-type]
    new_shape = FullWidth.of(kept, widening.size, widening.fill)

    def redo() -> None:
        module.__class__, module.normalized_shape = new_class, new_shape  # type: ignore[assignment]

    def undo() -> None:
        module.__class__, module.normalized_shape = old_class, old_shape

    return redo, undo
