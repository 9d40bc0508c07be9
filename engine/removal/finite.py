"""Non-finite weights: zero times infinity is not zero, so no channel that meets them can be removed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from engine.errors import InputError
from engine.program.arrays import is_finite
from engine.program.graph import Value
from engine.removal.propagate import Structure

__all__ = ["check_finite"]


def check_finite(structure: Structure, stored: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Reject a model with non-finite weights, or masks that zero non-finite entries: ``0 * inf`` is NaN.

    Values that are only added, such as an attention mask, may be infinite.

    Args:
        structure: determines which tensors are weights.
        stored: parameters and buffers by canonical name.
        masks: canonical masks.

    Raises:
        InputError: naming the parameter and its first non-finite entry.
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
    """Yield the stored values that channels are multiplied by, including those behind computed weights."""
    for _, c in structure.contractions():
        yield from structure.graph.sources(c.weight)
        if c.bias is not None:
            yield c.bias
    for node in structure.graph.nodes:
        if structure.rules.of(node).normalises:
            yield from (value for value in node.inputs if value.stored)
