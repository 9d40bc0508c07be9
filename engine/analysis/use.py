"""Backward pass: which entries of every tensor influence an output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.layers import Layers
from engine.analysis.uncertain import Rare, amounts, widened
from engine.program.arrays import reduce_to
from engine.program.graph import Graph, Node, Value, rule_errors

__all__ = ["Use"]


class _Rule(Protocol):
    @property
    def use(self) -> Callable[[Node, Use], None]: ...

    @property
    def rare(self) -> Rare: ...


class _Rules(Protocol):
    def of(self, node: Node) -> _Rule: ...


class _Structure(Protocol):
    """What is read of a `Structure`, which stands above this file."""

    @property
    def graph(self) -> Graph: ...

    @property
    def rules(self) -> _Rules: ...

    @property
    def table(self) -> Layers: ...

    @property
    def born(self) -> Tensor: ...


class Use:
    """Used entries of every value: compact bool arrays, resolved along the dimensions that carry slots.

    Args:
        structure: determines which dimensions are resolved.
        constants: determines which weights and factors are zero.
    """

    def __init__(self, structure: _Structure, constants: Constants) -> None:
        self.graph = structure.graph
        self.constants = constants
        self._arrays: dict[int, Tensor] = {}
        self._shapes: dict[int, list[int]] = {}
        self._table = structure.table
        self._channels = self._table.counts(self._table.look(structure.born))  # of each layer
        for value in self.graph.outputs:
            self.add_all(value)
        for index in itertools.chain(*self.graph.interchangeable, self.graph.whole_along):
            value = self.graph.values[index]
            self.add(value, constants[value] != 0)
        for node in reversed(self.graph.nodes):
            if any(self._is_used(value) for value in node.outputs):
                rule = structure.rules.of(node)
                with rule_errors(node):
                    rule.use(node, self)
                self._widen(node, rule)

    def _widen(self, node: Node, rule: _Rule) -> None:
        """Extend use to all amounts that a node might take for other data."""
        numbers = self.graph.uncertain.get(node.index, ())
        unread = rule.rare.for_gradients
        if amounts(node, numbers, unread):
            preserved = rule.rare.preserved(node, self.graph)
            for value, used in widened(node, numbers, self.__getitem__, preserved, unread):
                if used is None:
                    self.add_all(value)
                else:
                    self.add(value, used)

    def _is_used(self, value: Value) -> bool:
        array = self._arrays.get(value.index)
        return array is not None and bool(array.numpy().any())

    def shape(self, value: Value) -> list[int]:
        """Return the compact shape in which use of a value is stored: expanded along channel dimensions only.

        No other slots, such as the tokens of a position table, are ever removed.
        """
        shape = self._shapes.get(value.index)
        if shape is None:
            layers = self._table.touched(value.index)
            touched = {d for dims, place in layers if self._channels[place] for d in dims}
            shape = self._shapes[value.index] = [n if d in touched else 1 for d, n in enumerate(value.shape)]
        return shape

    def __getitem__(self, value: Value) -> Tensor:
        """Return which entries of a value are used."""
        array = self._arrays.get(value.index)
        if array is None:
            array = self._arrays[value.index] = torch.zeros(self.shape(value), dtype=torch.bool)
        return array

    def along(self, value: Value, dim: int) -> Tensor:
        """Return which indices of a dimension are used, shape ``(size,)``."""
        array = self[value]
        if array.size(dim) == array.numel():
            return array.reshape(-1).expand(value.shape[dim])
        rows = array.movedim(dim, 0)
        return rows.reshape(rows.size(0), -1).any(1).expand(value.shape[dim])

    def add(self, value: Value, used: Tensor) -> None:
        """Mark entries as used; the array is reduced or broadcast to the compact shape of the value."""
        shape = self.shape(value)
        used = used if list(used.shape) == shape else reduce_to(used, shape)
        before = self._arrays.get(value.index)
        if before is not None:
            used = before | used
        self._arrays[value.index] = used if list(used.shape) == shape else used.expand(shape)

    def add_beside(self, values: Iterable[Value | None], used: Tensor) -> None:
        """Mark what an op has in the place of its parameters, where it is computed: scales, shifts, statistics.

        Args:
            values: in the place of the parameters.
            used: which of their entries used outputs read.
        """
        for value in values:
            if value is not None and not value.stored:
                self.add(value, used)

    def add_all(self, value: Value) -> None:
        """Mark all entries of a value as used."""
        self._arrays[value.index] = torch.ones(self.shape(value), dtype=torch.bool)
