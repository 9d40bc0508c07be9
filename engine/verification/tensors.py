"""Tensors of the masked and the compacted model: parameters times masks, and these after a plan."""

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
from engine.running.recomputed import RecomputedTensor

__all__ = ["Recipe", "masked_recipes", "may_share", "run_tensors", "small_recipes"]

_SMALL = 4096
"""Minimum number of elements of a tensor that is worth a stand-in."""

_OFTEN = 2
"""Number of reads per run above which a weight is computed once (a cell that is called at each step)."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to compute a tensor in any dtype: ``slice(stored * mask) + folds``.

    Attributes:
        stored: values to start from; shares the memory of the model's tensor.
        mask: 0/1 mask, compact.
        cut: the part to keep.
        folds: constants to add, in order.
    """

    stored: Tensor
    mask: Tensor | None = None
    cut: Slice | None = None
    folds: tuple[Fold, ...] = ()

    def dtype(self, wide: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the result; ``wide=None``, integers and booleans keep their own."""
        return self.stored.dtype if wide is None or not self.stored.is_floating_point() else wide

    def worth_it(self, wide: torch.dtype | None) -> bool:
        """Whether a stand-in pays off: the result is large, has the stored tensor's shape, and needs its own memory."""
        changes = self.mask is not None or self.dtype(wide) != self.stored.dtype
        return changes and self.stored.numel() >= _SMALL and self.cut is None and not self.folds

    def make(self, wide: torch.dtype | None) -> Tensor:
        """Return the tensor; the stored one itself if nothing changes."""
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
        """Return the entries at some indices of the first two dimensions, if there are no cuts or folds."""
        assert self.cut is None and not self.folds
        tensor = self.stored.index_select(0, first).index_select(1, second).to(self.dtype(wide))
        if self.mask is None:
            return tensor
        mask = self.mask
        for dim, index in ((0, first), (1, second)):
            mask = mask if mask.size(dim) == 1 else mask.index_select(dim, index)
        return tensor.mul_(mask)


def masked_recipes(model: nn.Module, graph: Graph, masks: Mapping[str, Tensor]) -> dict[str, Recipe]:
    """Return ``parameter * mask`` and the buffers of a model in its current state, by canonical name."""
    stored = {name: t.detach() for name, t in stored_tensors(model).items() if graph.aliases.get(name) == name}
    return {name: Recipe(t, masks[name].to(t.device) if name in masks else None) for name, t in stored.items()}


def small_recipes(masked: Mapping[str, Recipe], plan: Plan) -> dict[str, Recipe]:
    """Return masked parameters and buffers after a plan."""
    folds: dict[str, list[Fold]] = {}
    for fold in plan.folds:
        folds.setdefault(fold.name, []).append(fold)
    return {
        name: replace(recipe, cut=plan.slices.get(name), folds=tuple(folds.get(name, ())))
        for name, recipe in masked.items()
    }


def may_share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory.

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
    """Return the tensors to run a model with; large weights are computed when they are read.

    This only works for weights that ops read. Recurrent layers access the memory of theirs directly, and a model that
    does not run in float64 may have custom code that does, so these are computed at once.

    Args:
        model: the model whose tensors they replace.
        graph: graph of the model, which shows how often each is read.
        recipes: recipes of the tensors, by name.
        wide: dtype of floating ones, or None for their own.
        masked: whether whole rows and columns may be zero; tensors of a compacted model are not searched for these.
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
    """Return the names of parameters that only ops read."""
    recurrent = [m for m in distinct_modules(model).values() if isinstance(m, nn.RNNBase)]
    early = {id(p) for m in recurrent for p in m.parameters()}
    return {name for name, parameter in parameters_of(model).items() if id(parameter) not in early}
