"""Dependency groups: parameter entries that are removed together, as users and criteria see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.bounds import check_kinds
from engine.errors import InputError
from engine.program.arrays import support
from engine.program.contraction import Contraction
from engine.program.defaults import own_defaults
from engine.program.graph import Graph, Node, Value
from engine.removal.clusters import clusters
from engine.removal.propagate import Structure
from engine.removal.structure import structure_for
from engine.rule import Registry

__all__ = ["Group", "Member", "dependency_groups", "group_masks", "groups_of", "producers_of", "units_at"]


@dataclass(frozen=True, eq=False)
class Member:
    """The part of a parameter that belongs to a group.

    Attributes:
        parameter: its full name; that of a buffer for a table with several numbers per unit.
        role: ``"out"`` for weight and bias of a layer that produces the units, ``"norm"`` for parameters of a norm,
            ``"in"`` for the input columns of a consumer, ``"scale"`` for parameters and tables that are combined with
            the units point by point.
        units: int64, broadcastable to the parameter; the unit of each entry, -1 where it does not belong to the group.
        shape: shape of the parameter.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> member = dependency_groups(net, torch.zeros(1, 1, 4, 4))[0].members[2]
        >>> member.parameter, member.role, member.shape, member.units.shape
        ('2.weight', 'in', (2, 4, 1, 1), torch.Size([1, 4, 1, 1]))
    """

    parameter: str
    role: str
    units: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Units (channels) that touch the same parameters; each can be removed as a whole.

    Attributes:
        name: first layer that produces the units; with ``#2`` and so on if a layer feeds several groups.
        layers: all layers that produce the units, by first use.
        size: number of units.
        members: the parameters involved.
        reason: why the group is frozen, or None.
        rows: int64 ``(size,)``; different rows must lose equally many units (groups of a convolution, chunks).
        slots: int64 ``(size,)``, the slot behind each unit.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> first, last = dependency_groups(net, torch.zeros(1, 1, 4, 4))
        >>> first.name, first.layers, first.size, last.reason
        ('0', ('0',), 4, 'is an output of the model')
    """

    name: str
    layers: tuple[str, ...]
    size: int
    members: tuple[Member, ...]
    reason: str | None
    rows: Tensor
    slots: Tensor

    def __str__(self) -> str:
        head = f"{self.name}: {self.size} units" + (f" (frozen: {self.reason})" if self.reason else "")
        return "\n".join([head, *(f"  {m.role:<5} {m.parameter} {list(m.shape)}" for m in self.members)])


@own_defaults()
def dependency_groups(
    model: nn.Module, example_inputs: Any, *, graph: Graph | None = None, rules: Registry | None = None
) -> list[Group]:
    """Return the dependency groups of a model, by first use.

    Args:
        model: it is only read.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Raises:
        TraceError: if the model rejects the example inputs, or the graph is stale.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> print(dependency_groups(net, torch.zeros(1, 3, 8, 8))[0])
        0: 4 units
          out   0.weight [4, 3, 1, 1]
          out   0.bias [4]
          norm  1.weight [4]
          norm  1.bias [4]
          in    3.weight [2, 4, 1, 1]
    """
    check_kinds(dependency_groups, locals())
    structure = structure_for(model, example_inputs, graph, rules)
    return groups_of(structure, [*(name for name, _ in model.named_parameters()), *structure.masked_tables])


def groups_of(structure: Structure, parameters: Iterable[str]) -> list[Group]:
    """Return the groups of a structure; ``parameters``: names of possible members."""
    root = structure.roots == torch.arange(len(structure.roots))
    numbered = clusters(structure, structure.born & root, balanced=False)
    rows = clusters(structure, structure.born & root)
    producers = producers_of(structure)
    wanted = set(parameters)
    members = _members(structure, numbered, wanted) if wanted else {}
    slots_of = _by_number(numbered)
    layers_of = _layers(numbered, producers)
    groups: list[Group] = []
    taken: dict[str, int] = {}
    for number, layers in layers_of.items():
        slots = slots_of[number]
        taken[layers[0]] = taken.get(layers[0], 0) + 1
        name = layers[0] if taken[layers[0]] == 1 else f"{layers[0]}#{taken[layers[0]]}"
        row = rows[slots].unique(return_inverse=True)[1]
        reason = structure.slots.why(slots)
        groups.append(Group(name, layers, len(slots), tuple(members.get(number, ())), reason, row, slots))
    return groups


def producers_of(structure: Structure) -> list[tuple[str, Tensor]]:
    """Return (module, slots that it produces) per contraction or table, in order of execution."""
    producers = []
    for node in structure.graph.nodes:
        for value, dim in output_channels(structure, node):
            output_slots = structure.along(value, dim)
            if output_slots is not None:
                producers.append((node.module, output_slots))
    return producers


def output_channels(structure: Structure, node: Node) -> list[tuple[Value, int]]:
    """Return (value, dimension) along which a node produces channels: outputs of contractions, columns of tables."""
    contractions = [(c.output, c.output_dim) for c in structure.rules.contractions(node)]
    return contractions + [(p.input, p.dim) for p in structure.rules.of(node).rare.produces(node)]


def _by_number(numbered: Tensor) -> list[Tensor]:
    """Return the slots of each group, ascending, by group number."""
    order = numbered.argsort(stable=True)
    counts = torch.bincount(numbered + 1)  # -1 is not a group
    return list(order.split(counts.tolist()))[1:]


def _layers(numbered: Tensor, producers: list[tuple[str, Tensor]]) -> dict[int, tuple[str, ...]]:
    """Return the layers that produce each group's units; groups and layers by first use."""
    layers_by_group: dict[int, dict[str, None]] = {}
    for name, output_slots in producers:
        for number in numbered[output_slots].unique_consecutive().tolist():
            if number >= 0:
                layers_by_group.setdefault(number, {})[name] = None
    return {number: tuple(layers) for number, layers in layers_by_group.items()}


def _members(structure: Structure, numbered: Tensor, parameters: set[str]) -> dict[int, list[Member]]:
    unit = torch.full_like(numbered, -1)
    for slots in _by_number(numbered):
        unit[slots] = torch.arange(len(slots))
    members: dict[int, list[Member]] = {}
    roles = _roles(structure)
    tables = structure.masked_tables
    for name, value in sorted(structure.graph.stored.items(), key=lambda item: item[0] in tables):
        for layer in structure.of(value) if name in parameters else ():
            of = numbered[layer]
            for number in of[of >= 0].unique().tolist():
                units = torch.where(of == number, unit[layer], -1)
                members.setdefault(number, []).append(Member(name, roles(value, layer), units, value.shape))
    return members


def _roles(structure: Structure) -> Any:
    """Return a function (value, layer) -> role."""
    weights: dict[int, Contraction] = {}
    biases: set[int] = set()
    norms: set[int] = set()
    magnitudes = {value.index for value in structure.magnitudes.values()}
    for node in structure.graph.nodes:
        contractions = structure.rules.contractions(node)
        for c in contractions:
            for source in structure.graph.sources(c.weight):
                weights.setdefault(source.index, c)
            biases |= set() if c.bias is None else {c.bias.index}
        if contractions:
            continue
        if structure.rules.of(node).normalises:
            norms |= {v.index for v in node.inputs if v.stored}

    def role(value: Value, layer: Tensor) -> str:
        if value.name in structure.masked_tables:
            return "scale"
        if value.index in structure.tables or value.index in biases:  # a table may be tied to the last layer too
            return "out"
        if (value.index, *support(layer)) in structure.unmasked:
            return "in"
        if value.index in magnitudes:
            return "out"
        if value.index in weights:
            c = weights[value.index]
            touched = support(layer)
            return "out" if (touched == (c.stacked,)) != c.transposed or c.depthwise else "in"
        return "norm" if value.index in norms else "scale"

    return role


@own_defaults()
def group_masks(groups: Iterable[Group], keep: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return masks that remove units from every parameter that produces them.

    Args:
        groups: dependency groups of a model.
        keep: group name -> bool ``(size,)``, which units to keep; groups that are not named are kept whole.

    Returns:
        ``{module: {parameter: float mask}}`` in full parameter shape (expanded, not materialised).

    Raises:
        InputError: for an unknown group name, a wrong length, or entries other than 0 and 1.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> groups = dependency_groups(net, torch.zeros(1, 1, 4, 4))
        >>> masks = group_masks(groups, {"0": torch.tensor([True, False, True, False])})
        >>> masks["0"]["bias"], masks["0"]["weight"].shape
        (tensor([1., 0., 1., 0.]), torch.Size([4, 1, 1, 1]))
    """
    check_kinds(group_masks, locals())
    groups_by_name = {group.name: group for group in groups}
    masks: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, kept_units in keep.items():
        if not isinstance(kept_units, Tensor):
            raise InputError(f"`keep` of the group {name!r} must be a bool tensor, got {type(kept_units).__name__}.")
        if name not in groups_by_name or tuple(kept_units.shape) != (groups_by_name[name].size,):
            have = (
                f"it has {groups_by_name[name].size} units"
                if name in groups_by_name
                else f"the groups are {', '.join(groups_by_name)}"
            )
            raise InputError(f"`keep` names the group {name!r} with shape {tuple(kept_units.shape)}; {have}.")
        if kept_units.dtype is not torch.bool and not ((kept_units == 0) | (kept_units == 1)).all():
            raise InputError(f"`keep` of the group {name!r} has entries other than 0 and 1.")
        for parameter, mask, shape in _member_masks(groups_by_name[name], kept_units):
            masks[parameter] = mask * masks[parameter] if parameter in masks else mask
            shapes[parameter] = shape
    masks_by_module: dict[str, dict[str, Tensor]] = {}
    for parameter, mask in masks.items():
        module, _, key = parameter.rpartition(".")
        masks_by_module.setdefault(module, {})[key] = mask.expand(shapes[parameter])
    return masks_by_module


def _member_masks(group: Group, kept_units: Tensor) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    flags = torch.cat([kept_units.cpu().float(), torch.ones(1)])  # unit -1 is not in the group
    for member in group.members:
        if member.role != "in":
            yield member.parameter, flags[member.units], member.shape


def units_at(slots: Tensor, groups: Iterable[Group]) -> dict[str, Tensor]:
    """Return, by group, the unit behind each slot, -1 where there is none; groups without any are left out."""
    units: dict[str, Tensor] = {}
    for group in groups:
        order = group.slots.argsort()
        at = torch.searchsorted(group.slots[order], slots).clamp(max=group.size - 1)
        hit = group.slots[order][at] == slots
        if hit.any():
            units[group.name] = torch.where(hit, order[at], -1)
    return units
