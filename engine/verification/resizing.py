"""Sizes of inputs for further trials: odd ones, other ones along each side, smaller and larger ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.alternatives.axes import Axis, axes_of, larger, smaller
from engine.program.graph import Graph
from engine.program.trees import tensors_in
from engine.rule import Registry

__all__ = ["Sizes"]

Attempt = Callable[[Mapping[Axis, int]], bool]
"""Runs the masked model at other sizes; returns whether it accepts them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model's inputs that may differ.

    Attributes:
        batch: the number of samples, if it may differ.
        sides: heights, widths, numbers of tokens or steps; without dimensions that a layer contracts or normalises.
        shrinks: whether they may be smaller: on an accelerator, an index beyond the end breaks more than the run.
    """

    batch: Axis | None
    sides: tuple[Axis, ...]
    shrinks: bool

    @classmethod
    def of(cls, graph: Graph, rules: Registry, batch_dim: int, together: bool) -> Sizes:
        """Find the sizes of a model.

        Args:
            graph: the model; if it declares dynamic dimensions, no others count.
            rules: op rules, which identify contracted and normalised dimensions.
            batch_dim: the batch dimension of the inputs.
            together: whether samples are known to form a batch of any size.
        """
        tensors = list(tensors_in((graph.args, graph.kwargs)))
        axes = [
            replace(axis, batch=(0, batch_dim) in axis.places)
            for axis in axes_of(graph.args, graph.kwargs, graph.dynamic_dims)
            if axis.size
        ]
        batch = next((axis for axis in axes if axis.batch), None)
        features = _features(graph, rules)
        sides = [axis for axis in axes if axis is not batch and not axis.places & features]
        whole = [t for t in tensors if not t.is_floating_point()]
        return cls(batch if together else None, tuple(sides), all(t.device.type == "cpu" for t in whole))

    @property
    def only_said(self) -> dict[Axis, int]:
        """The sizes of a larger resolution along declared dynamic dimensions."""
        return {axis: larger(axis.size) for axis in self.sides}

    def explore(self, attempt: Attempt, alone: bool, all_larger: bool = True) -> bool:
        """Try at most three sizes: all sides smaller and odd at batch size 1, larger and odd ones, or one side alone.

        Args:
            attempt: makes a run, and returns whether the model accepted it.
            alone: whether a single sample has already run.
            all_larger: whether the larger run is larger along all sides, and not along the last one alone.

        Returns:
            Whether a run was as large as `larger` requires.
        """
        one = {} if self.batch is None else {self.batch: 1}
        small = _odd_ones(self.sides) if self.shrinks else {}
        if small and attempt(one | small):
            larger_ones = _odd_larger_ones(self.sides if all_larger else self.sides[-1:])
            if attempt(one | small | larger_ones):
                return True
            attempt(one | small | _longer(self.sides[-1:]))
        elif small and self._attempt_side(attempt, one):
            return False
        elif not self.shrinks and self.sides:
            attempt(one | _longer(self.sides[-1:]))
        elif one and not alone:
            attempt(one)
        return False

    def _attempt_side(self, attempt: Attempt, one: Mapping[Axis, int]) -> bool:
        """Try another size along one side: of pictures a smaller multiple, elsewhere an odd one, then a larger one."""
        first = self.sides[0]
        if first.is_image_side:
            last = self.sides[-1]
            return attempt({**one, last: last.size - 32 if last.size > 64 else max(last.size // 2, 1)})
        return attempt({**one, **_odd_ones([first])}) and attempt({**one, **_longer([first])})


def _odd_ones(axes: Sequence[Axis]) -> dict[Axis, int]:
    """Return a smaller odd size for each axis, different ones if possible."""
    sizes: dict[Axis, int] = {}
    for axis in axes:
        near = smaller(axis.size) | 1
        candidates = [n for n in (*range(near, axis.size, 2), near) if n not in sizes.values()]
        sizes[axis] = candidates[0] if candidates else near
    return {axis: n for axis, n in sizes.items() if n <= axis.size}


def _odd_larger_ones(axes: Sequence[Axis]) -> dict[Axis, int]:
    """Return a larger odd size for each axis, all different; the last one is the smallest."""
    sizes: dict[Axis, int] = {}
    for axis in reversed(axes):
        near = larger(axis.size) | 1
        sizes[axis] = next(n for n in range(near, near + 2 * len(axes), 2) if n not in sizes.values())
    return sizes


def _longer(axes: Sequence[Axis]) -> dict[Axis, int]:
    return {axis: axis.size + 1 + axis.size % 2 for axis in axes}


def _features(graph: Graph, rules: Registry) -> frozenset[tuple[int, int]]:
    """Return the dimensions of inputs that a layer contracts or normalises, which hold features."""
    tensors = list(tensors_in((graph.args, graph.kwargs)))
    positions = {
        value.index: position
        for position, (value, tensor) in enumerate(zip(graph.inputs, tensors, strict=False))
        if value.shape == tuple(tensor.shape)
    }
    features: set[tuple[int, int]] = set()
    for node in graph.nodes:
        if any(value.index in positions for value in node.inputs):
            statistic = rules.of(node).statistic
            spans = [] if statistic is None else [statistic(node)]
            dims = [(c.input, c.input_dim) for c in rules.contractions(node)]
            dims += [(span.input, span.dim) for span in spans if span is not None]
            features |= {(positions[v.index], dim) for v, dim in dims if v.index in positions}
    return frozenset(features)
