"""What masks leave of a model: units of groups, and the weights that read something.

A masked channel outputs zero, so the weights that read it do nothing and a compaction removes them, though no mask
covers them. Whoever looks at weights leaves them out: then a masked run decides as a compacted one does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine import Group, Member, Slice
from lightning_compress.selection.amounts import Masks, kept_units


class Living:
    """What is not dead.

    Attributes:
        kept: which units of a group are not masked, bool ``(size,)`` by group name; all where it is missing.
        reads: of a weight some of whose entries read masked units only: which do not, bool and broadcastable to it, by
            its full name.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> groups = engine.dependency_groups(net, torch.zeros(1, 1))
        >>> alive = Living(groups, {"0": {"weight": torch.tensor([[1], [0]])}})
        >>> alive.kept["0"], alive.reads["2.weight"]
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
                self._leave_out(group, device)

    def _leave_out(self, group: Group, device: torch.device | str) -> None:
        flags = _flags(self.kept[group.name], others=True)
        for member in group.members:
            if member.role == "in":
                live = flags[member.units].to(device)
                live_before = self.reads.get(member.parameter)
                self.reads[member.parameter] = live if live_before is None else live_before & live

    def part(self, name: str, values: Tensor) -> Tensor:
        """Values of a parameter's entries, zero where they read masked units only.

        Args:
            name: full name of the parameter.
            values: one for each of its entries.
        """
        live = self.reads.get(name)
        return values if live is None else values * live.to(values.device)

    def weights_per_unit(self, group: Group) -> float:
        """How many weights that are not dead put a unit out, on average over the units that are not masked."""
        if group.name not in self._counts:
            members = [m for m in group.members if m.role == "out" and m.units.ndim > 1]
            kept = self.kept.get(group.name, torch.ones(group.size, dtype=torch.bool))
            total = sum(self._entries(member, kept) for member in members)
            self._counts[group.name] = total / max(int(kept.sum()), 1)
        return self._counts[group.name]

    def _entries(self, member: Member, kept: Tensor) -> int:
        live = _flags(kept, others=False)[member.units]
        if member.parameter in self.reads:
            live = live & self.reads[member.parameter].cpu()
        return int(live.sum()) * (math.prod(member.shape) // live.numel())


def _flags(kept: Tensor, others: bool) -> Tensor:
    return torch.cat([kept.cpu(), torch.tensor([others])])  # unit -1 is not of the group


def survivors(groups: Sequence[Group], model: nn.Module, cuts: Mapping[nn.Parameter, Slice]) -> dict[str, Tensor]:
    """Which units of each group a compaction has left.

    Args:
        groups: groups of the model as it was.
        model: the model as it is.
        cuts: what stayed of each parameter that got smaller.

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


def _survivors(group: Group, model: nn.Module, cuts: Mapping[nn.Parameter, Slice]) -> Tensor:
    if not group.members:  # only entries of buffers, and these stay
        return torch.ones(group.size, dtype=torch.bool)
    member = group.members[0]
    cut = cuts.get(model.get_parameter(member.parameter))
    left = member.units if cut is None else cut.apply_compact(member.units)
    kept = torch.zeros(group.size, dtype=torch.bool)
    kept[left[left >= 0]] = True
    return kept
