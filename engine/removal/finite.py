"""Weights that are not finite: zero times infinity is no zero, so nothing that meets them can be removed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from engine.analysis.propagate import Structure
from engine.errors import InputError
from engine.program.arrays import is_finite
from engine.program.graph import Value

__all__ = ["check_finite"]


def check_finite(structure: Structure, stored: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Refuse a model whose weights are not finite, or whose masks close what is not: ``0 * inf`` is NaN.

    What is only added, as a mask of attention is, may hold infinities.

    Args:
        structure: says which tensors are weights.
        stored: parameters and buffers by canonical name.
        masks: canonical masks.

    Raises:
        InputError: naming the parameter and the first entry that is not finite.
    """
    multiplied = {value.name: value for value in _multiplied(structure) if value.name is not None}
    for name, tensor in stored.items():
        if (name in multiplied or name in masks) and name in structure.graph.stored and not is_finite(tensor.detach()):
            broken = ~tensor.detach().isfinite()
            if name not in multiplied:
                broken &= (masks[name] == 0).to(broken.device)
            if broken.any():
                place = tuple(broken.nonzero()[0].tolist())
                raise InputError(
                    f"{name!r} holds {tensor.detach()[place].item()} at {place}. Zero times that is not zero, so no "
                    "channel that meets it can be removed exactly; give it finite values."
                )


def _multiplied(structure: Structure) -> Iterator[Value]:
    """Yield the stored values that channels are multiplied with, and those behind computed weights."""
    for _, c in structure.contractions():
        yield from structure.graph.sources(c.weight)
        if c.bias is not None:
            yield c.bias
    for node in structure.graph.nodes:
        if structure.rules.rule(node.op).normalises:
            yield from (value for value in node.inputs if value.stored)
