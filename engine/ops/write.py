"""A write into a view of a tensor (``x[:, :4] = …``), which the recorder makes explicit."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from engine.arrays import support
from engine.graph import Node
from engine.ops import shape, slicing
from engine.ops.shape import through
from engine.propagate import Labels
from engine.recorder import WRITE
from engine.rule import Rule, Sample
from engine.use import Use

__all__ = ["RULES"]

_MOVES = {**shape.MOVES, **slicing.MOVES}


def _seen_through(node: Node, array: Tensor) -> Tensor | None:
    """Look at an array of the base through the views that led to what was written; None if a view is unknown."""
    for view, position in node.args["chain"]:
        if view.op not in _MOVES:
            return None
        array = _MOVES[view.op](view, array, position)
    return array


def _labels(node: Node, labels: Labels) -> None:
    """What is written goes together with the place it is written to; the rest of the base is as it was."""
    base, written = node.inputs
    labels.claim(base)
    places = [_seen_through(node, layer) for layer in labels.layers(base)]
    known = [place for place in places if place is not None]
    theirs = {support(layer) for layer in labels.layers(written)}
    if len(known) < len(places) or {support(place) for place in known if support(place)} != theirs:
        for value in (base, written):
            labels.freeze(value, f"written through a view ({node!r})")
    else:
        for place in known:
            labels.add(written, place)
    labels.pass_on(base, node.output)


def _use(node: Node, use: Use) -> None:
    base, written = node.inputs
    use.add(base, use[node.output])
    use.add_all(written)


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


RULES = [Rule((WRITE,), _labels, use=_use, samples=_samples)]
