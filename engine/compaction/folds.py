"""Folds: constants of removed channels, added to stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compaction.slices import Slice
from engine.removal.keep import Consumer, Kept, corrections

__all__ = ["Fold", "folds_of"]


@dataclass(frozen=True, eq=False)
class Fold:
    """An addition to a stored tensor, in its new shape: ``tensor[:, index] += delta`` along ``dim``.

    Attributes:
        name: canonical name of the parameter or buffer.
        dim: dimension that ``index`` selects from, or -1 for the whole tensor.
        index: int64 indices along ``dim``; empty for the whole tensor.
        delta: float64.
    """

    name: str
    dim: int
    index: Tensor
    delta: Tensor

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the sum, computed in float64, in the tensor's dtype."""
        wide = tensor.double()
        delta = self.delta.to(tensor.device)
        wide = wide + delta if self.dim < 0 else wide.index_add(self.dim, self.index.to(tensor.device), delta)
        return wide.to(tensor.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the fold as primitives and tensors."""
        return {"name": self.name, "dim": self.dim, "index": self.index, "delta": self.delta}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Fold:
        """Load a state written by `state_dict`."""
        return cls(str(state["name"]), int(state["dim"]), state["index"].long(), state["delta"].double())


def folds_of(kept: Kept, slices: Mapping[str, Slice]) -> Iterator[Fold]:
    """Yield the folds of a decision; a weight that is called several times is folded once."""
    done: set[tuple[int, int, bool]] = set()
    for consumer in kept.consumers:
        removed = consumer.removed(kept.shrunk.keep)
        if removed.any() and consumer.key not in done:
            done.add(consumer.key)
            yield (_carry if consumer.carried else _sink)(consumer, removed, kept, slices)
    for name, (_, delta) in corrections(kept.shrunk.structure, kept.constants, kept.shrunk).items():
        delta = _sliced(name, delta, slices)
        if delta.any():
            yield Fold(name, -1, torch.zeros(0, dtype=torch.long), delta)


def _sliced(name: str, tensor: Tensor, slices: Mapping[str, Slice]) -> Tensor:
    return slices[name].apply(tensor) if name in slices else tensor


def _sink(consumer: Consumer, removed: Tensor, kept: Kept, slices: Mapping[str, Slice]) -> Fold:
    """``Σ_i Σ_k W[o, i, k] c_i``, added to the bias or subtracted from the running mean."""
    c, sink = consumer.contraction, consumer.sink
    assert sink is not None and sink.name is not None  # otherwise a carrier is needed
    shares = torch.where(removed, consumer.constants, 0.0).view(c.groups, 1, c.inputs)
    delta = (c.canonical(kept.constants[c.weight].expand(c.weight.shape)).sum(-1) * shares).sum(-1).reshape(-1)
    if sink is not c.bias:
        delta = -delta
    return Fold(sink.name, -1, torch.zeros(0, dtype=torch.long), _sliced(sink.name, delta, slices))


def _carry(consumer: Consumer, removed: Tensor, kept: Kept, slices: Mapping[str, Slice]) -> Fold:
    """``W[:, r] += Σ_i (c_i / c_r) W[:, i]`` with the largest kept constant ``c_r`` in each group."""
    c = consumer.contraction
    assert c.weight.name is not None  # constant inputs of a computed weight stay alive
    weight = kept.constants[c.weight]
    delta = torch.zeros_like(weight)
    inner, target = c.canonical(weight), c.canonical(delta)
    constants, shared = (row.view(c.groups, c.inputs) for row in (consumer.constants, consumer.shared))
    is_removed = removed.view(c.groups, c.inputs)
    is_kept = kept.shrunk.keep[consumer.slots].view(c.groups, c.inputs)
    strength = torch.where(is_kept, shared.nan_to_num(0.0), 0.0).abs()
    for group in is_removed.any(1).nonzero()[:, 0].tolist():
        carrier = int(strength[group].argmax())
        ratio = constants[group][is_removed[group]] / constants[group][carrier]
        target[group, :, carrier] = (inner[group][:, is_removed[group]] * ratio[None, :, None]).sum(1)
    delta = _sliced(c.weight.name, delta, slices)
    dim = c.input_place
    index = delta.movedim(dim, 0).flatten(1).any(1).nonzero()[:, 0]
    return Fold(c.weight.name, dim, index, delta.index_select(dim, index))
