"""Shapes and indices of every value after a removal."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.program.arrays import support
from engine.program.graph import Value
from engine.removal.propagate import Structure

__all__ = ["Shrunk"]


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A structure and the slots that are kept.

    Attributes:
        structure: the slots.
        keep: bool per slot, read at representatives.
        overrides: integer attributes per module, set to what the code requires.
    """

    structure: Structure
    keep: Tensor
    overrides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    _shapes: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _indices: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def _looked(self) -> Tensor:
        return self.structure.table.look(self.keep)

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        return self.structure.table.parts(self._looked)

    @functools.cached_property
    def _counts(self) -> list[int]:
        return self.structure.table.counts(self._looked)

    def indices(self, value: Value, dim: int) -> Tensor | None:
        """Return which indices of an activation's dimension are kept, bool ``(size,)``; None if it has no slots."""
        slots = self.structure.along(value, dim)
        return None if slots is None else self.keep[slots]

    def mask(self, value: Value) -> Tensor | None:
        """Return which entries of a value are kept, as a compact bool array; None if all are."""
        kept: Tensor | None = None
        places = self.structure.table.touched(value.index)
        for layer, (_, place) in zip(self.structure.of(value), places, strict=True):
            if self._loses(place):
                stays = self._parts[place].view(layer.shape)
                kept = stays if kept is None else kept & stays
        return kept

    def rows(self, value: Value) -> dict[int, Tensor] | None:
        """Return the kept indices of each narrowed dimension, int64; None if a layer spans several dimensions.

        Values that lose the same indices share the tensor.
        """
        places = self.structure.table.of(value.index)
        return None if places is None else {d: self._index(place) for d, place in places if self._loses(place)}

    def _loses(self, place: int) -> bool:
        return self._counts[place] < self.structure.table.sizes[place]

    def _index(self, place: int) -> Tensor:
        if place not in self._indices:
            self._indices[place] = self._parts[place].nonzero()[:, 0]
        return self._indices[place]

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a value after the removal."""
        shape = self._shapes.get(value.index)
        if shape is None:
            shape = self._shapes[value.index] = self._sizes(value)
        return shape

    def _sizes(self, value: Value) -> tuple[int, ...]:
        places = self.structure.table.of(value.index)
        if places is None:
            mask = self.mask(value)
            return value.shape if mask is None else self._joint_sizes(value, mask)
        sizes = list(value.shape)
        for dim, place in places:
            sizes[dim] = self._counts[place]
        return tuple(sizes)

    def _joint_sizes(self, value: Value, mask: Tensor) -> tuple[int, ...]:
        sizes, dims = list(value.shape), support(mask)
        for dim in dims:
            sizes[dim] = int(mask.movedim(dim, 0).reshape(mask.size(dim), -1).any(1).sum())
        if len(dims) > 1:  # rows of a grouped weight, or states of layers, keep different columns, but equally many
            sizes[dims[-1]] = int(mask.sum(dims[-1]).max())
        return tuple(sizes)

    def attributes(self) -> Mapping[str, Mapping[str, int]]:
        """Return the integer attributes that change, per module, with their new values."""
        changed = {module: dict(values) for module, values in self.overrides.items()}
        for node, before in self.structure.attributes:
            after = self.structure.rules.of(node).attributes(node, self.shape)
            news = {k: after[k] for k, old in before.items() if old != after[k]}
            if news:
                changed.setdefault(node.module, {}).update(news)
        return changed
