"""Find out what an opaque module does to its channels by running it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.program.graph import Node, Value, walk_values
from engine.program.trees import map_tensors, tensors_in
from engine.running.evaluation import evaluating
from engine.running.process import seed_generators

__all__ = ["Probe", "channel_inputs", "channel_outputs"]

_ROUNDS = 3
_PASSES: WeakKeyDictionary[Node, tuple[int, ...]] = WeakKeyDictionary()


def channel_inputs(node: Node) -> list[Value]:
    """Return the tensors that an opaque module is called with, each once."""
    values = walk_values((node.args["args"], node.args["kwargs"]))
    return list({v.index: v for v in values if not v.stored}.values())


def channel_outputs(node: Node) -> tuple[Value, ...]:
    """Return the tensors that an opaque module returns; none if it also changes tensors that are not its own."""
    start, stop = node.args["results"]
    return node.outputs[start:stop]


def _fill(tree: Any, tensors: Mapping[int, Tensor]) -> Any:
    if isinstance(tree, Value):
        return tensors[tree.index].clone()
    if isinstance(tree, (list, tuple)):
        return type(tree)(_fill(x, tensors) for x in tree)
    return {k: _fill(x, tensors) for k, x in tree.items()} if isinstance(tree, Mapping) else tree


class Probe:
    """Runs the module of a node on random inputs of the recorded shapes, in float64 if possible.

    Args:
        node: a call of an opaque module.
        stored: parameters and buffers to run it with, by their name in the module; its own by default.
        training: run it in train mode.
    """

    def __init__(self, node: Node, stored: Mapping[str, Tensor] | None = None, training: bool = False) -> None:
        self._node, self._module, self._training = node, node.args["module"], training
        self._inputs, self._outputs = channel_inputs(node), channel_outputs(node)
        own: dict[str, Tensor] = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        self._stored = {name: t.detach() for name, t in {**own, **(stored or {})}.items()}
        self._parameters = {name for name, _ in self._module.named_parameters()}
        self._generator = torch.Generator().manual_seed(0)
        self._dtype: torch.dtype | None = torch.float64
        self.device = next((t.device for t in self._stored.values()), torch.device("cpu"))
        self.runs = not self.device.type == "meta" and any(v.dtype.is_floating_point for v in self._inputs)
        if self.runs and self._call(self.noise()) is None:
            self._dtype = None
            self.runs = self._call(self.noise()) is not None

    # ------------------------------------------------------------------ running it

    def noise(self, larger: Sequence[int] = ()) -> dict[int, Tensor]:
        """Return a random tensor for each input, by value index; ``larger`` names dimensions to enlarge."""
        inputs = {}
        for value in self._inputs:
            shape = [n + 3 if d in larger else n for d, n in enumerate(value.shape)]
            random = torch.randn(shape, generator=self._generator, dtype=torch.float64) * 2
            inputs[value.index] = random if value.dtype.is_floating_point else torch.zeros(shape, dtype=value.dtype)
        return inputs

    def random_parameters(self, positive: bool) -> dict[str, Tensor]:
        """Return the stored tensors with random numbers in the parameters."""
        tensors = dict(self._stored)
        for name in sorted(self._parameters):
            tensor = tensors[name]
            if tensor.is_floating_point():
                random = torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64)
                tensors[name] = (random.abs() + 0.1 if positive else random).to(tensor.device)
        return tensors

    def _call(self, inputs: Mapping[int, Tensor], stored: Mapping[str, Tensor] | None = None) -> list[Tensor] | None:
        """Return the outputs in float64, or None if the module does not run on these inputs."""
        stored = self._stored if stored is None else stored
        tensors = {name: self._cast(t, self._stored[name].dtype).clone() for name, t in stored.items()}
        types = {v.index: v.dtype for v in self._inputs}
        cast_inputs = {index: self._cast(t, types[index]).to(self.device) for index, t in inputs.items()}
        args, kwargs = (_fill(self._node.args[name], cast_inputs) for name in ("args", "kwargs"))
        train = list(self._module.modules()) if self._training else []
        try:
            with evaluating(self._module, train), torch.no_grad():
                seed_generators(0)
                out = torch.func.functional_call(self._module, tensors, args, kwargs)
        except Exception:  # a user's code on numbers that it was not written for: nothing is known then
            return None
        return [t.cpu().double() for t in tensors_in(map_tensors(out, torch.Tensor.detach))]

    def _cast(self, tensor: Tensor, own: torch.dtype) -> Tensor:
        return tensor.to(self._dtype or own) if tensor.is_floating_point() else tensor

    # ------------------------------------------------------------------ what it does

    def passes(self) -> tuple[int, ...]:
        """Return the dimensions along which each entry of an output only depends on entries of the inputs at its index.

        Computed once per node, with the module's own weights and with random ones, because weights that are zero or
        diagonal by chance prove nothing.
        """
        if self._node not in _PASSES:
            values = (*self._inputs, *self._outputs)
            rank = min(v.ndim for v in values) if self.runs and self._outputs else 0
            alike = [d for d in range(1, rank) if len({(v.ndim, v.shape[d]) for v in values}) == 1]
            floating = all(v.dtype.is_floating_point for v in self._inputs)
            candidates = [d for d in alike if values[0].shape[d] > 1] if floating else []
            _PASSES[self._node] = tuple(d for d in candidates if all(self._passes(d, r) for r in range(_ROUNDS)))
        return _PASSES[self._node]

    def _passes(self, dim: int, attempt: int) -> bool:
        weights = self._stored if attempt == 0 else self.random_parameters(positive=True)
        base, other = self.noise(), self.noise()
        size = self._inputs[0].shape[dim]
        changed = torch.randperm(size, generator=self._generator)[: max(size // 2, 1)]
        mixed = {k: t.index_copy(dim, changed, other[k].index_select(dim, changed)) for k, t in base.items()}
        before, after = self._call(base, weights), self._call(mixed, weights)
        if before is None or after is None or len(before) != len(self._outputs):
            return False
        rest = torch.ones(size, dtype=torch.bool).index_fill(0, changed, False).nonzero()[:, 0]
        return all(
            a.shape == b.shape and _close(a.index_select(dim, rest), b.index_select(dim, rest), self._tolerance)
            for a, b in zip(before, after, strict=True)
        )

    @property
    def _tolerance(self) -> float:
        return 1e-12 if self._dtype is not None else 1e-5

    def constants(self, dim: int, input_rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the constants of each output along a dimension in `passes`, NaN where it varies.

        Args:
            dim: one of `passes`.
            input_rows: per input its constants along it, NaN where it varies.
        """
        varies = [torch.full((self._inputs[0].shape[dim],), math.nan, dtype=torch.float64) for _ in self._outputs]
        still = ~torch.stack([row.isnan() for row in input_rows]).any(0)
        agreed_rows: list[Tensor] | None = None
        for outputs in self._filled(dim, input_rows, still) if self.runs and still.any() else ():
            rows = [_row(out, dim, still, self._tolerance) for out in outputs]
            if agreed_rows is not None:
                rows = [_agreed(a, b, self._tolerance) for a, b in zip(agreed_rows, rows, strict=True)]
            agreed_rows = rows
        return varies if agreed_rows is None else agreed_rows

    def _filled(self, dim: int, input_rows: Sequence[Tensor], still: Tensor) -> Iterator[list[Tensor]]:
        """Run the module on known constants and random numbers elsewhere, at the recorded size and at a larger one."""
        size = max(v.ndim for v in self._inputs)
        for larger in ((), (), tuple(d for d in range(1, size) if d != dim)):
            inputs = self.noise(larger)
            for value, row in zip(self._inputs, input_rows, strict=True):
                at = [-1 if d == dim else 1 for d in range(value.ndim)]
                inputs[value.index] = torch.where(still.view(at), row.nan_to_num(0.0).view(at), inputs[value.index])
            outputs = self._call(inputs)
            if outputs is not None:
                yield outputs

    def zeros(self, kept: Mapping[str, Tensor]) -> list[tuple[int, Tensor]] | None:
        """Return, for each output, a dimension and its indices that are 0 for any input and weights.

        Args:
            kept: entries of each parameter that may be nonzero, by its name in the module.
        """
        dead: list[Tensor] | None = None
        for attempt in range(4 * _ROUNDS if self.runs else 0):
            weights = self.random_parameters(positive=attempt % 2 == 0) if attempt else self._stored
            masked = {name: t * kept[name].to(t) if name in kept else t for name, t in weights.items()}
            outputs = self._call(self.noise(), masked)
            if outputs is None:
                return None
            now = [out == 0 for out in outputs]
            dead = now if dead is None else [a & b for a, b in zip(dead, now, strict=True)]
        return None if dead is None else [_zero_rows(d) for d in dead]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = float(a.abs().max()) if a.numel() else 0.0
    return math.isfinite(scale) and bool(((a - b).abs() <= tolerance * max(scale, 1.0)).all())


def _agreed(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    return torch.where((a - b).abs() <= tolerance * a.abs().clamp(min=1), a, math.nan)


def _row(out: Tensor, dim: int, still: Tensor, tolerance: float) -> Tensor:
    """Return the single number at each index of a dimension, NaN if there are several, or it is not ``still``."""
    rows = out.movedim(dim, 0).flatten(1)
    first = rows[:, 0]
    same = ((rows - first[:, None]).abs() <= tolerance * first.abs().clamp(min=1)[:, None]).all(1)
    return torch.where(same & still & first.isfinite(), first, math.nan)


def _zero_rows(dead: Tensor) -> tuple[int, Tensor]:
    for dim in range(1, dead.ndim):
        rows = dead.movedim(dim, 0).flatten(1).all(1)
        if rows.any():
            return dim, rows
    return 1, torch.zeros(dead.shape[1] if dead.ndim > 1 else 1, dtype=torch.bool)
