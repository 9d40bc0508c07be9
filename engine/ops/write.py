"""Writes into a view of a tensor (``x[:, :4] = …``), which the recorder makes explicit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops import shape, slicing
from engine.ops.shape import through
from engine.program.arrays import support, uniform
from engine.program.graph import Node, Value
from engine.recording.versions import WRITE
from engine.rule import Rule, Sample

__all__ = ["RULES"]

_MOVES = {**shape.MOVES, **slicing.MOVES}
_LARGEST = 1 << 20  # largest number of entries to examine individually


def _seen_through(node: Node, array: Tensor) -> Tensor | None:
    """Apply the views that led to the written tensor to an array of the base; None for an unknown view."""
    for view, position in node.args["chain"]:
        if view.op not in _MOVES:
            return None
        array = _MOVES[view.op](view, array, position)
    return array


def _labels(node: Node, labels: Labels) -> None:
    """Tie written entries to the positions they are written to; all other entries of the base propagate."""
    base, written = node.inputs
    labels.claim(base)
    places = [_seen_through(node, layer) for layer in labels.layers(base)]
    targets = [place for place in places if place is not None]
    theirs = {support(layer) for layer in labels.layers(written)}
    if len(targets) < len(places) or {support(place) for place in targets if support(place)} != theirs:
        for value in (base, written):
            labels.freeze(value, f"written through a view ({node!r})")
    else:
        for place in targets:
            labels.add(written, place)
    labels.pass_on(base, node.output)


def _constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """The written values where something was written, the old values elsewhere."""
    base, written = node.inputs
    old, new = constants.plain(base), constants.plain(written)
    index = _index(node, base, old, new)
    seen = None if index is None else _seen_through(node, index)
    if index is None or seen is None or _nowhere(written):
        return None
    seen, new = torch.broadcast_tensors(seen, new)
    count = torch.bincount(seen.reshape(-1), minlength=index.numel()) * (math.prod(written.shape) // seen.numel())
    value = _uniform(seen, new, index.numel()).view(index.shape)
    whole = (count == math.prod(base.shape) // index.numel()).view(index.shape)
    kept = old.expand(index.shape)
    follows = any(constants.amounts.at(view) for view, _ in node.args["chain"])
    value = torch.where(whole & (not follows) | (kept == value), value, math.nan)
    result = torch.where((count == 0).view(index.shape), kept, value)
    if follows:  # at another size it covers more or fewer entries
        return [uniform(result, [d for d in range(base.ndim) if not constants.amounts.is_channel(node.output, d)])]
    return [result]


def _nowhere(written: Value) -> bool:
    """Whether nothing is written at the example's size; at another, something may be."""
    return not math.prod(written.shape)


def _index(node: Node, base: Value, old: Tensor, new: Tensor) -> Tensor | None:
    """Number the entries of the base along the dimensions that the result depends on; None if there are too many."""
    sizes = [1] * base.ndim
    for dim, size in enumerate(base.shape):
        place = _seen_through(node, torch.arange(size).view([-1 if d == dim else 1 for d in range(base.ndim)]))
        if place is None:
            return None
        depends = old.size(dim) > 1 or len(place.unique()) < size or set(support(place)) & set(support(new))
        sizes[dim] = size if depends else 1
    numel = math.prod(sizes)
    return torch.arange(numel).view(sizes) if numel <= _LARGEST else None


def _uniform(places: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return the value written to each position, NaN if there is none or more than one."""
    flat, sources = places.reshape(-1), values.reshape(-1)
    low, high = (
        torch.full((numel,), start, dtype=torch.float64).scatter_reduce(0, flat, sources, how)
        for start, how in ((math.inf, "amin"), (-math.inf, "amax"))
    )
    return torch.where(low == high, low, math.nan)


def _use(node: Node, use: Use) -> None:
    base, written = node.inputs
    used = use[node.output]
    use.add(base, used)
    seen = _seen_through(node, used)
    if seen is None or _nowhere(written):
        use.add_all(written)
    else:
        use.add(written, seen)


def _samples() -> Iterable[Sample]:
    def positions(x: Tensor) -> Tensor:
        x = x * 1
        x[:, :, 1:2].relu_()
        return x

    def channels(x: Tensor) -> Tensor:
        x = x * 1
        x[:, :4] = x[:, 4:]
        return x

    def base(x: Tensor) -> Tensor:
        x = x * 1
        flat = x.flatten(2)
        x.sigmoid_()
        return x * flat.mean(2)[:, :, None, None]

    yield through("write to some positions", positions)
    yield through("write to some channels", channels)
    yield through("write to the base of a view", base)


RULES = [Rule((WRITE,), _labels, _constants, _use, samples=_samples)]
