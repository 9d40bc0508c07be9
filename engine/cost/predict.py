"""Predict a model's cost without some units of its groups, fast enough to be called many times by a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from engine.analysis.constraints import closed
from engine.cost.count import Counter
from engine.errors import InputError
from engine.groups import Group
from engine.program.graph import Graph
from engine.removal.demands import settle
from engine.removal.shrink import Shrunk
from engine.removal.structure import structure_of
from engine.rule import Registry

__all__ = ["Predictor"]


class Predictor:
    """Counts from the structure alone, which is computed once, without reading weights.

    The result equals that of `count_flops_params` under `group_masks`, except where constants of removed channels need
    a carrier, or where other channels are removed as a consequence.

    Args:
        model: it is only read.
        graph: graph of the model.
        groups: dependency groups from the same graph.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.
        batch_dim: counts are per sample along this dimension.

    Example:
        >>> import engine
        >>> net, x = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.zeros(1, 1, 2, 2)
        >>> graph = engine.trace(net, x)
        >>> predict = Predictor(net, graph, engine.dependency_groups(net, x, graph=graph))
        >>> predict({}), predict({"0": torch.tensor([True, False, False, True])})
        ((48, 18), (24, 10))
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        groups: Iterable[Group],
        *,
        rules: Registry | None = None,
        batch_dim: int | None = 0,
    ) -> None:
        self._model, self._graph, self._batch_dim = model, graph, batch_dim
        self._structure = structure_of(graph, rules)
        self._groups = {group.name: group for group in groups}

    def __call__(self, keep: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return the predicted cost.

        Args:
            keep: group name -> bool ``(size,)``, which units to keep; groups that are not named are kept whole.

        Returns:
            ``(multiply-accumulates, parameters)``.

        Raises:
            InputError: for an unknown group name, or a wrong length.
        """
        is_kept = torch.ones(len(self._structure.roots), dtype=torch.bool)
        for name, units in keep.items():
            group = self._groups.get(name)
            if group is None or tuple(units.shape) != (group.size,):
                raise InputError(f"`keep` names the group {name!r} with shape {tuple(units.shape)}: there is none.")
            is_kept[group.slots[~units.cpu()]] = False
        counter = Counter(self._graph, self._structure.rules, self._settled(is_kept), "default", self._batch_dim)
        return counter.total(), counter.parameters(self._model)

    def _no_preference(self) -> Tensor:
        return torch.zeros(len(self._structure.roots))

    def _settled(self, is_kept: Tensor) -> Shrunk:
        while True:
            shrunk = Shrunk(self._structure, closed(self._structure.constraints, is_kept, self._no_preference))
            unmet = settle(shrunk).unmet
            before = int(is_kept.sum())
            for _, _, slots in unmet:
                is_kept[slots] = True
            if int(is_kept.sum()) == before:
                return shrunk
