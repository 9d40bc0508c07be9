"""Functional norms whose statistics span channels that were removed, and what stands for them in torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FullGroups", "FullWidth", "modules_with", "norms_over"]


class FullWidth(tuple[int, ...]):
    """``normalized_shape`` of a norm that lost channels: the remaining sizes, and the full width of the statistics."""

    size: int
    fill: Tensor | None

    @classmethod
    def of(cls, kept: int, size: int, fill: Tensor | None) -> FullWidth:
        """Return the shape ``(kept,)`` of a norm over ``size`` channels."""
        self = cls((kept,))
        self.size, self.fill = size, fill
        return self


class FullGroups(int):
    """``num_groups`` of a group norm that lost constant channels."""

    fill: Tensor

    @classmethod
    def of(cls, groups: int, fill: Tensor) -> FullGroups:
        """Return the number of groups, with the constants of the removed channels, group by group."""
        self = cls(groups)
        self.fill = fill
        return self


def _laid_out(out: Tensor, like: Tensor) -> Tensor:
    """Return a part of a wider tensor in the memory format of a norm's output, on which a ``view`` may depend."""
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return out.contiguous(memory_format=torch.channels_last)
    if like.dim() == 5 and like.is_contiguous(memory_format=torch.channels_last_3d):
        return out.contiguous(memory_format=torch.channels_last_3d)
    return out.contiguous()


def norms_over(size: int, with_fill: bool) -> ModuleType:
    """Return `torch.nn.functional` with norms over ``size`` channels, some of which were removed.

    Without constants to fill in, the norms are restricted to what TorchScript supports.
    """

    norm: Any = ModuleType("norm")  # TorchScript reads numbers from modules, but not from closures
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
        out = F.layer_norm(F.pad(input, [0, missing]), [norm.size], weight, bias, eps)
        return out[..., :kept].contiguous()

    def rms_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        kept, missing = input.shape[-1], norm.size - input.shape[-1]
        if weight is not None:
            weight = F.pad(weight, [0, missing])
        return _laid_out(F.rms_norm(F.pad(input, [0, missing]), [norm.size], weight, eps)[..., :kept], input)

    def group_norm(
        input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        kept, missing = input.shape[1] // num_groups, (norm.size - input.shape[1]) // num_groups
        if weight is not None:
            weight = F.pad(weight.unflatten(0, [num_groups, kept]), [0, missing]).flatten()
        if bias is not None:
            bias = F.pad(bias.unflatten(0, [num_groups, kept]), [0, missing]).flatten()
        full = F.pad(input.unflatten(1, [num_groups, kept]), [0, 0] * (input.dim() - 2) + [0, missing]).flatten(1, 2)
        out = F.group_norm(full, num_groups, weight, bias, eps)
        return _laid_out(out.unflatten(1, [num_groups, kept + missing])[:, :, :kept].flatten(1, 2), input)

    functional = ModuleType(F.__name__)
    vars(functional).update(vars(F))
    functional.group_norm = _filled_groups if with_fill else group_norm  # type: ignore[attr-defined]
    functional.layer_norm = _filling(F.layer_norm) if with_fill else layer_norm  # type: ignore[attr-defined]
    functional.rms_norm = _filling(F.rms_norm) if with_fill else rms_norm  # type: ignore[attr-defined]
    return functional


def _filling(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a functional norm over the last dimension that fills in constants for its statistics."""

    def wide(x: Tensor, shape: FullWidth, *parameters: Any, **named: Any) -> Tensor:
        assert shape.fill is not None
        missing = shape.size - x.shape[-1]

        def padded(item: Any) -> Any:
            return F.pad(item, (0, missing)) if isinstance(item, Tensor) else item

        full = torch.cat([x, shape.fill.to(x).expand(*x.shape[:-1], missing)], -1)
        arguments = {name: padded(p) for name, p in named.items()}
        out = norm(full, (shape.size,), *map(padded, parameters), **arguments)[..., : x.shape[-1]]
        return out.contiguous() if norm is F.layer_norm else _laid_out(out, x)

    return wide


def _filled_groups(
    x: Tensor, groups: FullGroups, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group norm that fills in constants for its statistics."""
    fill, positions = groups.fill.view(groups, -1), [1] * (x.ndim - 2)
    kept, missing = x.shape[1] // groups, fill.shape[1]
    rest = fill.to(x).view(1, groups, missing, *positions).expand(len(x), -1, -1, *x.shape[2:])
    full = torch.cat([x.unflatten(1, (groups, kept)), rest], 2).flatten(1, 2)

    def padded(p: Tensor | None) -> Tensor | None:
        return None if p is None else F.pad(p.view(groups, kept), (0, missing)).flatten()

    out = F.group_norm(full, groups, padded(weight), padded(bias), eps)
    return _laid_out(out.unflatten(1, (groups, kept + missing))[:, :, :kept].flatten(1, 2), x)


def modules_with(functional: ModuleType) -> dict[ModuleType, ModuleType]:
    """Return what takes the place of torch's modules, so that ``torch.nn.functional`` is another one."""
    replacements = {F: functional}
    for module, name in ((nn, "functional"), (torch, "nn")):
        replacements[module] = ModuleType(module.__name__)
        vars(replacements[module]).update(vars(module), **{name: replacements[F if module is nn else nn]})
    return replacements
