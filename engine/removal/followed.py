"""The numbers in the user's modules that can be set: those whose new value follows from the narrowed tensors.

Whoever loads a plan checks each number that it sets, from the file alone (`engine.compaction.numbers`). A number that
could not be checked is not set, and the channels that it counts stay.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.numbers.counts import Dimension, follows
from engine.program.graph import Value
from engine.removal.shrink import Shrunk

__all__ = ["followed"]


def followed(shrunk: Shrunk, wishes: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the numbers, by module and name, that follow from the tensors which become narrower.

    Args:
        shrunk: the removal.
        wishes: the values that the code requires.
    """
    graph = shrunk.structure.graph

    def inside(prefix: str) -> list[Dimension]:
        names = dict.fromkeys(graph.aliases[name] for name in graph.aliases if name.startswith(prefix))
        return [d for name in names if name in graph.stored for d in _dimensions(shrunk, graph.stored[name])]

    olds = graph.attributes
    kept = {
        module: {name: new for name, new in news.items() if follows(module, name, olds[module], news, inside)}
        for module, news in wishes.items()
    }
    return {module: own for module, own in kept.items() if own}


def _dimensions(shrunk: Shrunk, value: Value) -> list[Dimension]:
    """Return what is kept along each dimension of a stored tensor; only the number if rows lose different columns."""
    rows, after = shrunk.rows(value), shrunk.shape(value)
    masks = {} if rows is None else {dim: _mask(index, value.shape[dim]) for dim, index in rows.items()}
    if rows is None and (entries := shrunk.mask(value)) is not None and entries.size(0) > 1:
        masks = {0: entries.flatten(1).any(1)}
    return [Dimension(n, after[d], masks.get(d)) for d, n in enumerate(value.shape)]


def _mask(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill(0, index, True)
