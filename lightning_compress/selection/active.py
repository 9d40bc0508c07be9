"""The units and weights that remain active under masks.

A masked channel outputs zero, so weights that read it have no effect, although no mask covers them, and a compaction
removes them. Criteria and penalties ignore them, so that a masked run makes the same decisions as a compacted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine import Group, Member, Slice
from engine.program import stored_tensor
from lightning_compress.selection.amounts import Masks, kept_units


class Active:
    """Units and weights that masks leave active.

    Attributes:
        kept: units that are not masked, bool ``(size,)`` by group name; all if missing.
        reads: entries of a weight that read an unmasked unit, bool and broadcastable to the weight, by its full name;
            all if missing.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> groups = engine.dependency_groups(net, torch.zeros(1, 1))
        >>> active = Active(groups, {"0": {"weight": torch.tensor([[1], [0]])}})
        >>> active.kept["0"], active.reads["2.weight"]
        (tensor([ True, False]), tensor([[ True, False]]))
    """

    def __init__(
        self, groups: Iterable[Group] = (), masks: Masks | None = None, device: torch.device | str = "cpu"
    ) -> None:
        chosen = list(groups)
        self.kept: Mapping[str, Tensor] = kept_units(chosen, masks or {})
        self.reads: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        for group in chosen:
            if not self.kept[group.name].all():
                self._mark_consumers(group, device)

    def _mark_consumers(self, group: Group, device: torch.device | str) -> None:
        flags = _flags(self.kept[group.name], others=True)
        for member in group.members:
            if member.role == "in":
                reads = flags[member.units].to(device)
                before = self.reads.get(member.parameter)
                self.reads[member.parameter] = reads if before is None else before & reads

    def part(self, name: str, values: Tensor) -> Tensor:
        """Zero the values of inactive entries of a parameter.

        Args:
            name: full name of the parameter.
            values: one value per entry.
        """
        reads = self.reads.get(name)
        return values if reads is None else values * reads.to(values.device)

    def weights_per_unit(self, group: Group) -> float:
        """Return the number of active weights that produce a unit, averaged over the unmasked units."""
        if group.name not in self._counts:
            members = [m for m in group.members if m.role == "out" and m.units.ndim > 1]
            kept = self.kept.get(group.name, torch.ones(group.size, dtype=torch.bool))
            total = sum(self._entries(member, kept) for member in members)
            self._counts[group.name] = total / max(int(kept.sum()), 1)
        return self._counts[group.name]

    def _entries(self, member: Member, kept: Tensor) -> int:
        active = _flags(kept, others=False)[member.units]
        if member.parameter in self.reads:
            active = active & self.reads[member.parameter].cpu()
        return int(active.sum()) * (math.prod(member.shape) // active.numel())


def _flags(kept: Tensor, others: bool) -> Tensor:
    return torch.cat([kept.cpu(), torch.tensor([others])])  # unit -1 is not in the group


def survivors(groups: Sequence[Group], model: nn.Module, cuts: Mapping[Tensor, Slice]) -> dict[str, Tensor]:
    """Return which units of each group remain after a compaction.

    Args:
        groups: groups of the model before the compaction.
        model: the compacted model.
        cuts: slice of each parameter and buffer that was narrowed.

    Returns:
        Bool of shape ``(size,)`` by group name.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> groups = engine.dependency_groups(net, torch.zeros(1, 1))
        >>> cut = Slice.along(0, torch.tensor([0, 2]), (3, 1))
        >>> survivors(groups, net, {net[0].weight: cut})["0"]
        tensor([ True, False,  True])
    """
    return {group.name: _survivors(group, model, cuts) for group in groups}


def _survivors(group: Group, model: nn.Module, cuts: Mapping[Tensor, Slice]) -> Tensor:
    if not group.members:  # only entries of other buffers, which are not removed
        return torch.ones(group.size, dtype=torch.bool)
    member = group.members[0]
    cut = cuts.get(stored_tensor(model, member.parameter))
    left = member.units if cut is None else cut.apply_compact(member.units)
    kept = torch.zeros(group.size, dtype=torch.bool)
    kept[left[left >= 0]] = True
    return kept
