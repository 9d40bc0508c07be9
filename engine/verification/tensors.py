"""What masked and compacted model compute with: parameters times masks, and what a plan makes of these."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.compaction.folds import Fold
from engine.compaction.plan import Plan
from engine.compaction.slices import Slice
from engine.program.graph import Graph
from engine.program.stored import distinct_modules, parameters_of, stored_tensors
from engine.recording.recomputed import RecomputedTensor

__all__ = ["Recipe", "masked_recipes", "may_share", "run_tensors", "small_recipes"]

_SMALL = 4096
"""Elements below which a tensor is not worth a stand-in."""

_OFTEN = 2
"""Reads per run above which a weight is made once (a cell that is called at each step of a sequence)."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to make a tensor, in any dtype: ``slice(stored * mask) + folds``.

    Attributes:
        stored: values to start from; shares the memory of the model's tensor.
        mask: 0/1 mask, compact.
        cut: what stays.
        folds: constants to add, one after the other.
    """

    stored: Tensor
    mask: Tensor | None = None
    cut: Slice | None = None
    folds: tuple[Fold, ...] = ()

    def dtype(self, wide: torch.dtype | None) -> torch.dtype:
        """Return the dtype that it is made in; None leaves each in its own, as do whole numbers and truth values."""
        return self.stored.dtype if wide is None or not self.stored.is_floating_point() else wide

    def worth_it(self, wide: torch.dtype | None) -> bool:
        """Whether it is large, of the stored one's shape, and takes memory of its own."""
        changes = self.mask is not None or self.dtype(wide) != self.stored.dtype
        return changes and self.stored.numel() >= _SMALL and self.cut is None and not self.folds

    def make(self, wide: torch.dtype | None) -> Tensor:
        """Return the tensor: the stored one itself where nothing changes."""
        tensor, mask = self.stored, self.mask
        if self.cut is not None:
            tensor, mask = self.cut.apply(tensor), None if mask is None else self.cut.apply_compact(mask)
        tensor = tensor.to(self.dtype(wide), copy=mask is not None)
        if mask is not None:
            tensor *= mask
        for fold in self.folds:
            tensor = fold.apply(tensor)
        return tensor

    def part(self, wide: torch.dtype | None, first: Tensor, second: Tensor) -> Tensor:
        """Return what is at some indices of the first two dimensions, where nothing is cut off or added."""
        assert self.cut is None and not self.folds
        tensor = self.stored.index_select(0, first).index_select(1, second).to(self.dtype(wide))
        if self.mask is None:
            return tensor
        mask = self.mask
        for dim, index in ((0, first), (1, second)):
            mask = mask if mask.size(dim) == 1 else mask.index_select(dim, index)
        return tensor.mul_(mask)


def masked_recipes(model: nn.Module, graph: Graph, masks: Mapping[str, Tensor]) -> dict[str, Recipe]:
    """Return ``parameter * mask`` and the buffers of a model as it is now, by canonical name."""
    stored = {name: t.detach() for name, t in stored_tensors(model).items() if graph.aliases.get(name) == name}
    return {name: Recipe(t, masks[name].to(t.device) if name in masks else None) for name, t in stored.items()}


def small_recipes(masked: Mapping[str, Recipe], plan: Plan) -> dict[str, Recipe]:
    """Return what a plan makes of masked parameters and buffers."""
    folds: dict[str, list[Fold]] = {}
    for fold in plan.folds:
        folds.setdefault(fold.name, []).append(fold)
    return {
        name: replace(recipe, cut=plan.slices.get(name), folds=tuple(folds.get(name, ())))
        for name, recipe in masked.items()
    }


def may_share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may stand for the same memory.

    Example:
        >>> weight = torch.ones(2)
        >>> may_share(weight, weight.detach()), may_share(weight, weight.double())
        (True, False)
    """
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return True
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def run_tensors(
    model: nn.Module, graph: Graph, recipes: Mapping[str, Recipe], wide: torch.dtype | None, masked: bool
) -> dict[str, Tensor]:
    """Return the tensors to run a model with; large weights are made when they are read.

    That takes an op that reads them. Recurrent layers look at the memory of theirs first, and a model that does not run
    in float64 may have code of its own that does: all is made at once there.

    Args:
        model: whose tensors they replace.
        graph: tells how often each is read.
        recipes: how to make them, by name.
        wide: dtype of floating ones, or None for their own.
        masked: whether whole rows and columns of them may be zero; what is compacted is not searched for these.
    """
    reads = Counter(v.name for node in graph.nodes if node.path == "eval" for v in node.inputs if v.stored)
    late = set() if wide is None else _late(model) - graph.written
    tensors = {
        name: _stand_in(recipe, wide, reads[name] > _OFTEN, masked)
        if wide is not None and name in late and recipe.worth_it(wide)
        else recipe.make(wide)
        for name, recipe in recipes.items()
    }
    return tensors | {name: tensors[name].clone() for name in graph.written & tensors.keys()}


def _stand_in(recipe: Recipe, wide: torch.dtype, often: bool, masked: bool) -> Tensor:
    part = functools.partial(recipe.part, wide) if masked and recipe.stored.ndim > 1 else None
    return RecomputedTensor(recipe.stored, recipe.dtype(wide), lambda: recipe.make(wide), often, part)


def _late(model: nn.Module) -> set[str]:
    """Names of parameters that nothing but ops reads."""
    recurrent = [m for m in distinct_modules(model).values() if isinstance(m, nn.RNNBase)]
    early = {id(p) for m in recurrent for p in m.parameters()}
    return {name for name, parameter in parameters_of(model).items() if id(parameter) not in early}
