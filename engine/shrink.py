"""What every value looks like once some slots are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.arrays import support
from engine.graph import Value
from engine.propagate import Structure

__all__ = ["Shrunk"]


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A structure and the slots that stay.

    Attributes:
        structure: the slots.
        keep: bool per slot, read at representatives.
    """

    structure: Structure
    keep: Tensor
    _shapes: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _known: dict[int, tuple[Tensor, int]] = field(default_factory=dict, repr=False)

    def indices(self, value: Value, dim: int) -> Tensor | None:
        """Return which indices of an activation's dimension stay, bool ``(size,)``; None where it has no slots."""
        slots = self.structure.along(value, dim)
        return None if slots is None else self.keep[slots]

    def mask(self, value: Value) -> Tensor | None:
        """Return a compact bool array: which entries of a value stay; None where all do."""
        found: Tensor | None = None
        for layer in self.structure.of(value):
            stays = self.keep[layer]
            if not stays.all():
                found = stays if found is None else found & stays
        return found

    def rows(self, value: Value) -> dict[int, Tensor] | None:
        """Return which indices of each dimension with slots stay; None where dimensions hang together."""
        found: dict[int, Tensor] = {}
        for layer in self.structure.of(value):
            touched = support(layer)
            if len(touched) != 1 or touched[0] in found:
                return None
            found[touched[0]] = self._stays(layer)[0]
        return found

    def _stays(self, layer: Tensor) -> tuple[Tensor, int]:
        """Which entries of a layer stay, flat, and how many; values share their layers, which the structure keeps."""
        found = self._known.get(id(layer))
        if found is None:
            stays = self.keep[layer.reshape(-1)]
            found = self._known[id(layer)] = stays, int(stays.sum())
        return found

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape that a value will have."""
        known = self._shapes.get(value.index)
        if known is None:
            known = self._shapes[value.index] = self._sizes(value)
        return known

    def _sizes(self, value: Value) -> tuple[int, ...]:
        sizes = list(value.shape)
        if self.rows(value) is not None:
            for layer in self.structure.of(value):
                sizes[support(layer)[0]] = self._stays(layer)[1]
            return tuple(sizes)
        mask = self.mask(value)
        return value.shape if mask is None else self._joint_sizes(value, mask)

    def _joint_sizes(self, value: Value, mask: Tensor) -> tuple[int, ...]:
        sizes = list(value.shape)
        for dim in (d for d, n in enumerate(mask.shape) if n > 1):
            sizes[dim] = int(mask.movedim(dim, 0).reshape(mask.size(dim), -1).any(1).sum())
        if value.stored and mask.ndim > 1 and mask.size(0) > 1 and mask.size(1) > 1:
            # rows of a grouped weight keep other columns each, but equally many
            sizes[1] = int(mask.flatten(1).sum(1).max())
        return tuple(sizes)

    def attributes(self) -> Mapping[str, Mapping[str, int]]:
        """Return, per module, the integer attributes that change, with their new values."""
        changed: dict[str, dict[str, int]] = {}
        for node, before in self.structure.attributes:
            after = self.structure.rules.rule(node.op).attributes(node, self.shape)
            news = {k: after[k] for k, old in before.items() if old != after[k]}
            if news:
                changed.setdefault(node.module, {}).update(news)
        return changed
