"""Assumptions about recorded values that hold for all calls of a model, not only for the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.program.graph import Node, Value

__all__ = ["Assumptions"]


@dataclass
class Assumptions:
    """What code that did not run may do with recorded values.

    Attributes:
        used: values that count as used as a whole, each with the reason, by index.
        varying: values whose numbers are unknown, each with whether its zeros stay zero, by index.
        doubted: numbers among the arguments of ops that may be other numbers, by index of the node.
        interchangeable: groups of values, each of which may replace the others.
        whole_along: values with the dimensions along which they keep their sizes, by index.
        keeping: places of code that did not run and keeps all channels of what it reads.
        notes: messages for the user.

    Example:
        >>> import torch
        >>> value = Value(0, (2,), torch.float32)
        >>> assumptions = Assumptions()
        >>> assumptions.use([value], "may be read elsewhere")
        >>> assumptions.vary([value], zeros_stay=True)
        >>> assumptions.used[0][1], assumptions.varying[0][1]
        ('may be read elsewhere', False)
    """

    used: dict[int, tuple[Value, str]] = field(default_factory=dict)
    varying: dict[int, tuple[Value, bool]] = field(default_factory=dict)
    doubted: dict[int, tuple[int | float, ...]] = field(default_factory=dict)
    interchangeable: list[tuple[Value, ...]] = field(default_factory=list)
    whole_along: dict[int, tuple[Value, frozenset[int]]] = field(default_factory=dict)
    keeping: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def use(self, values: Iterable[Value], reason: str, place: str | None = None) -> None:
        """Count values as used; the first reason is kept.

        What is computed from an activation elsewhere may take its place, so its numbers are unknown, and no constant
        of it is folded. Parameters and buffers that are only read keep theirs.

        Args:
            values: the values.
            reason: a verb phrase about a value, for the user.
            place: place of the code that did not run and reads them.
        """
        for value in values:
            self.used.setdefault(value.index, (value, reason))
            if place is not None:
                self.keeping.add(place)
            if not value.stored:
                self.vary([value])

    def vary(self, values: Iterable[Value], *, zeros_stay: bool = False) -> None:
        """Assume that the numbers in values may be any others.

        Args:
            values: the values.
            zeros_stay: whether zeros stay zero; they do only if all assumptions about a value agree.
        """
        for value in values:
            _, before = self.varying.get(value.index, (value, True))
            self.varying[value.index] = value, zeros_stay and before

    def interchange(self, values: Sequence[Value]) -> None:
        """Assume that each of some values may replace the others: its numbers are unknown, but zeros stay zero.

        Args:
            values: the values; if they turn out not to have the same channels, all of them are kept.
        """
        self.interchangeable += [tuple(values)] if values else []
        self.vary(values, zeros_stay=True)

    def move(self, values: Sequence[Value], reason: str, place: str | None = None) -> None:
        """Assume that values may be padded, cut or resized along their dimensions from the third on; zeros stay zero.

        Args:
            values: the values; those with less than four dimensions count as used.
            reason, place: as for `use`.
        """
        self.use([value for value in values if value.ndim < 4], reason, place)
        pictures = [value for value in values if value.ndim >= 4]
        for value in pictures:
            self.keep_along(value, range(2, value.ndim))
        self.vary(pictures, zeros_stay=True)

    def keep_along(self, value: Value, dims: Iterable[int]) -> None:
        """Assume that other code combines or exchanges the entries of a value along some dimensions.

        Args:
            value: the value.
            dims: the dimensions, which keep their sizes. Along others, what is zero may still go; without any, whatever
                could go before.
        """
        _, before = self.whole_along.get(value.index, (value, frozenset[int]()))
        if after := before.union(dims):
            self.whole_along[value.index] = value, after

    def doubt(self, node: Node, numbers: Sequence[int | float]) -> None:
        """Assume that numbers among the arguments of an op may be any other numbers.

        Args:
            node: the op.
            numbers: the numbers.
        """
        self.doubted[node.index] = (*self.doubted.get(node.index, ()), *numbers)
