"""Search for the configuration that describes a narrowed network, by building its class and comparing sizes.

No table maps fields to sizes. The class is built from modified configurations on the meta device; changing a field
shows which dimensions of which parameters, and which numbers of which modules, depend on it. The search starts from the
old configuration and ends at one under which all names and shapes match the narrowed network. If several match, those
whose modules have the same numbers come first: four heads of 8 channels have the same shapes as two heads of 16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_compress.stock.fields import Path, Values

__all__ = ["Build", "Differing", "Look", "Misfit", "Number", "Search", "differing", "look_at"]

Build = Callable[[Values], nn.Module]
"""Builds the class from the old configuration with some numbers replaced; raises whatever the class raises."""

Number = int | float
Move = tuple[Path, Number]
Differing = Mapping[tuple[str, str], tuple[Number, Number]]
"""Numbers of modules in two networks, by module and attribute."""

Misfit = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]
"""Name of a tensor and its shapes in two networks."""

_MOST = 2_000  # builds
_WIDTH = 6  # configurations kept in each round of the beam search
_ROUNDS = 3
_PATIENCE = 2  # changes without an improvement
_DETOURS = 4
_MANY = 20  # fields


@dataclass(frozen=True)
class Look:
    """The sizes of a network.

    Attributes:
        shapes: shapes of its parameters and buffers, by name.
        numbers: numeric attributes of its modules, by module and attribute.
    """

    shapes: Mapping[str, tuple[int, ...]]
    numbers: Mapping[tuple[str, str], Number]

    def misfits(self, other: Look) -> list[Misfit]:
        """Return the tensors that differ from those of another network: name, shape here, shape there."""
        names = dict.fromkeys((*self.shapes, *other.shapes))
        pairs = [(name, self.shapes.get(name), other.shapes.get(name)) for name in names]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def strays(self, other: Look) -> int:
        """Return the number of module attributes that differ from those of another network."""
        return sum(1 for key, value in self.numbers.items() if not _close(value, other.numbers.get(key)))


def differing(one: Look, other: Look) -> Differing:
    """Return the numbers of modules that differ between two networks which both have them.

    Example:
        >>> looks = look_at(nn.LayerNorm(2, eps=1e-5)), look_at(nn.LayerNorm(2, eps=1e-6))
        >>> dict(differing(*looks))
        {('', 'eps'): (1e-05, 1e-06)}
    """
    pairs = {key: (value, other.numbers[key]) for key, value in one.numbers.items() if key in other.numbers}
    return {key: pair for key, pair in pairs.items() if not _close(*pair)}


def _close(one: Number, other: Number | None) -> bool:
    return other is not None and (one == other or math.isclose(one, other, rel_tol=1e-9))


def look_at(model: nn.Module, numbers: Mapping[tuple[str, str], Number] | None = None) -> Look:
    """Return the sizes of a network.

    Args:
        model: the network.
        numbers: values that replace those of the modules' attributes.

    Example:
        >>> look = look_at(nn.Linear(2, 3))
        >>> look.shapes["weight"], look.numbers["", "in_features"]
        ((3, 2), 2)
    """
    tensors = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    attributes = dict(_attributes(model))
    return Look(shapes, {**attributes, **(numbers or {})})


def _attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str], Number]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield (name, key), value


Score = tuple[int, int]
"""Dimensions that differ, numbers of modules that differ."""


@dataclass
class Search:
    """A search for the numbers of a configuration.

    Args:
        build: builds the class on the meta device.
        fields: the numbers of the old configuration; None for a field without a value.
        target: sizes of the narrowed network.
        looks: sizes by configuration; searches of one class may share them.
        most: maximum number of builds.
    """

    build: Build
    fields: Mapping[Path, Number | None]
    target: Look
    _start: Mapping[Path, Number] = field(default_factory=dict)
    looks: dict[tuple[tuple[Path, Number], ...], Look | None] = field(default_factory=dict)
    most: int = _MOST
    _builds: int = 0

    def look(self, values: Values) -> Look | None:
        """Return the sizes under a configuration; None if the class rejects it."""
        key = tuple(sorted(values.items(), key=str))
        if key not in self.looks:
            if self._builds > self.most:
                return None
            self._builds += 1
            try:
                self.looks[key] = look_at(self.build(values))
            except Exception:  # the class may raise anything for inconsistent numbers
                self.looks[key] = None
        return self.looks[key]

    def solve(self) -> list[dict[Path, Number]]:
        """Return the configurations whose shapes all match, best first, or else the single best one."""
        values = self._together({})
        right: list[dict[Path, Number]] = []
        for _ in range(_ROUNDS):  # the effect of a field may only show after another has changed
            score = self.score(values)
            right = self._searched(values)
            values = right[0]
            if not self.score(values)[0] or self.score(values) == score:
                break
        return self._detoured(values) if self.score(values)[0] else right

    def _together(self, start: dict[Path, Number]) -> dict[Path, Number]:
        """Combine all changes of single fields that improve the score, if there are many.

        A list of blocks has fields for each block, too many to change one after another.
        """
        base = self.look(start)
        assert base is not None
        moves, before = self._moves(start, base), self.score(start)
        if len({path for path, _ in moves}) <= _MANY:
            return start
        scores = {(path, value): self.score({**start, path: value}) for path, value in moves}
        nearer = sorted((move for move in moves if scores[move] < before), key=scores.__getitem__, reverse=True)
        changed = {**start, **dict(nearer)}
        return changed if self.score(changed) < before else start

    def _detoured(self, nearest: dict[Path, Number]) -> list[dict[Path, Number]]:
        """Return the best configurations after a change that fixes one tensor and breaks others.

        At half of the width, four heads have half of their size. Two heads have the right size, but then there are too
        many heads for keys and values.
        """
        results = [[nearest]]
        for move in self._detours(nearest):
            results.append(self._searched({**nearest, **move}))
            if not self.score(results[-1][0])[0]:
                break
        return min(results, key=lambda candidates: self.score(candidates[0]))

    def _detours(self, values: dict[Path, Number]) -> list[dict[Path, Number]]:
        """Return the changes of one field that fix a wrong tensor, best first."""
        base = self.look(values)
        assert base is not None
        wrong = {name for name, _, _ in self.target.misfits(base)}
        moves = [{path: value} for path, value in self._moves(values, base)]
        looks = [(move, look) for move in moves if (look := self.look({**values, **move})) is not None]
        useful = [move for move, look in looks if wrong - {name for name, _, _ in self.target.misfits(look)}]
        return sorted(useful, key=lambda move: self.score({**values, **move}))[:_DETOURS]

    def _moves(self, start: dict[Path, Number], base: Look) -> list[Move]:
        """Return the changes of one field that may improve a configuration."""
        self._start = start
        choices = {path: self._choices(path, base, look) for path in self.fields if (look := self._effect(path, base))}
        return [(path, value) for path, values in choices.items() for value in values]

    def others(self, values: Values) -> list[dict[Path, Number]]:
        """Return further configurations whose shapes match, without a field that changes numbers of modules.

        Heads of half the size have the same shapes as half as many heads, but need one change instead of several.

        Args:
            values: a configuration whose shapes match.
        """
        results: list[dict[Path, Number]] = []
        for path in values:
            rest = {other: value for other, value in values.items() if other != path}
            if self._wrong(values) - self._wrong(rest):
                results += [other for other in self._searched(rest, without=path) if not self.score(other)[0]]
        return sorted(results, key=self.score)

    def _wrong(self, values: Values) -> set[tuple[str, str]]:
        look = self.look(values)
        return set() if look is None else set(differing(self.target, look))

    def _searched(self, start: dict[Path, Number], without: Path | None = None) -> list[dict[Path, Number]]:
        """Return the best configurations reachable by changing some fields other than ``without``."""
        base = self.look(start)
        if base is None:
            return []
        moves = [move for move in self._moves(start, base) if move[0] != without]
        beam, patience = [frozenset[Move]()], _PATIENCE
        seen = {beam[0]: self.score(start)}
        while patience:
            best = min(seen.values())
            for values, (path, value) in itertools.product(beam, moves):
                if path not in dict(values):
                    changed = values | {(path, value)}
                    seen.setdefault(changed, self.score({**start, **dict(changed)}))
            beam = sorted((values for values in seen if len(values) == len(beam[0]) + 1), key=seen.__getitem__)[:_WIDTH]
            patience = patience - 1 if beam and min(seen.values()) >= best else _PATIENCE * bool(beam)
        right = [values for values in seen if not seen[values][0]] or [min(seen, key=seen.__getitem__)]
        return [{**start, **dict(values)} for values in sorted(right, key=lambda v: (seen[v], len(v)))]

    def score(self, values: Values) -> Score:
        """Return the distance of a configuration from the target."""
        look = self.look(values)
        if look is None:
            return (10**9, 0)
        return sum(_distance(*pair[1:]) for pair in self.target.misfits(look)), self.target.strays(look)

    def _effect(self, path: Path, base: Look) -> Look | None:
        """Return the sizes with another number in a field; None if the field is not a size."""
        for number in _others(self._value(path)):
            look = self.look({**self._start, path: number})
            if look is None:
                continue
            return look if look.shapes != base.shapes or look.numbers != base.numbers else None
        return None

    def _choices(self, path: Path, base: Look, changed: Look) -> list[Number]:
        """Return candidate values of a field, derived from the sizes that depend on it."""
        old, new = self._value(path), self._tried_number(path, changed)
        if isinstance(old, float):
            follows = [key for key, value in base.numbers.items() if value == old and changed.numbers.get(key) != value]
            same = {self.target.numbers[key] for key in follows if key in self.target.numbers}
            return sorted((same | set(self._ratios(old, float(new), base, changed))) - {old})
        if not self._matters(base, changed):
            return []
        values: set[Number] = set()
        for a, b, c in _dimensions(base, self.target, changed):
            if a != b and b != 0:
                values |= _linear(old, new, a, c, b)
                if isinstance(old, int):
                    values |= {old * b // a} if a and old * b % a == 0 else set()
        for ratio in {(a, b) for a, b, _ in _dimensions(base, self.target, None) if a != b and a and b}:
            for a, b in (ratio, ratio[::-1]):
                if isinstance(old, int) and old * b % a == 0:
                    values.add(old * b // a)
        for key, value in base.numbers.items():
            wanted, differs = self.target.numbers.get(key), changed.numbers.get(key) != value
            if differs and isinstance(wanted, int) and (value == old or old is None and changed.numbers[key] == new):
                values.add(wanted)
        if isinstance(old, int):
            values |= set(self._fractions(old, new, base, changed))
        return sorted(value for value in values if value != old and value > 0)

    def _fractions(self, old: int, new: Number, base: Look, changed: Look) -> Iterator[float]:
        """Yield the values of an integer field that is a ratio for which a size matches."""
        for a, b, c in _dimensions(base, self.target, changed):
            if a and b and a != b and a * new == c * old and old * b % a:
                yield old * b / a

    def _ratios(self, old: float, new: float, base: Look, changed: Look) -> Iterator[float]:
        """Yield the values of a ratio for which a size matches, also if the class rounds it down."""
        for a, b, c in _dimensions(base, self.target, changed):
            if a != b and b:
                yield from (old + (b - a + rest) * (new - old) / (c - a) for rest in (0, 0.5))

    def _matters(self, base: Look, changed: Look) -> bool:
        """Whether a dimension that depends on a field differs from the target, or no dimension depends on it."""
        return changed.shapes == base.shapes or any(a != b for a, b, _ in _dimensions(base, self.target, changed))

    def _tried_number(self, path: Path, changed: Look) -> Number:
        numbers = _others(self._value(path))
        return next(number for number in numbers if self.look({**self._start, path: number}) is changed)

    def _value(self, path: Path) -> Number | None:
        return self._start.get(path, self.fields[path])


def _others(value: Number | None) -> list[Number]:
    """Return other numbers for a field; if the class accepts none of them, the field is not a size."""
    if isinstance(value, float):
        return [value * 1.25 if value else 0.5]
    if value is None or value <= 0:
        return [24, 40, 2]
    return [n for n in (value * 2, value * 3, value // 2, value + 1) if n != value and n > 0]


def _distance(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> int:
    if one is None or other is None or len(one) != len(other):
        return 8
    return sum(a != b for a, b in zip(one, other, strict=True))


def _dimensions(base: Look, target: Look, changed: Look | None) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes in three networks of each dimension that differs between the first and the last."""
    for name, shape in base.shapes.items():
        wanted, new = target.shapes.get(name), None if changed is None else changed.shapes.get(name)
        if wanted is None or len(wanted) != len(shape) or new is not None and len(new) != len(shape):
            continue
        for n, (a, b) in enumerate(zip(shape, wanted, strict=True)):
            if changed is None or new is not None and new[n] != a:
                yield a, b, a if new is None else new[n]


def _linear(old: Any, new: Any, size: int, changed: int, wanted: int) -> set[int]:
    """Return the value of a field for which a size that depends on it linearly matches."""
    if old is None and isinstance(new, int) and changed:
        return {new * wanted // changed} if new * wanted % changed == 0 else set()
    if not isinstance(old, int) or not isinstance(new, int) or size == changed:
        return set()
    step = (wanted - size) * (new - old)
    return {old + step // (changed - size)} if step % (changed - size) == 0 else set()
