"""Repair conflicting masks, so that compaction removes all masked channels and leaves no constants behind."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import closed
from engine.analysis.use import Use
from engine.bounds import check_kinds
from engine.compaction.build import canonical_tensors
from engine.errors import InputError
from engine.groups import Group, groups_of
from engine.masks import Masks, canonical_masks, load_masks, narrowed, parameter_name
from engine.program.arrays import support
from engine.program.defaults import own_defaults
from engine.program.garbage import uncollected
from engine.program.graph import Graph, Node, Value
from engine.program.stored import stored_tensors
from engine.removal.keep import alive, consumers
from engine.removal.propagate import Structure
from engine.removal.structure import structure_for
from engine.removal.tables import masks_of_tables
from engine.rule import Registry

__all__ = ["RepairReport", "RepairedMasks", "check_policy", "fix_mask_conflict"]


class _Cost(NamedTuple):
    """Effect of a repair on one group."""

    name: str
    units: int
    before: dict[str, int]
    after: int
    channels: tuple[int, int]
    macs: tuple[int, int]


class RepairReport:
    """Effect and cost of a repair, computed on first access.

    Args:
        policy: the repair policy.
        costs: returns the effect per masked group.
    """

    def __init__(self, policy: str, costs: Callable[[], Iterable[_Cost]]) -> None:
        self.policy = policy
        self._find: Callable[[], Iterable[_Cost]] | None = costs

    @functools.cached_property
    def _costs(self) -> tuple[_Cost, ...]:
        costs = () if self._find is None else tuple(self._find())
        self._find = None  # it keeps the graph alive
        return costs

    def __getstate__(self) -> dict[str, Any]:
        return {"policy": self.policy, "_costs": self._costs, "_find": None}

    @property
    def rows(self) -> tuple[tuple[str, int, dict[str, int], int], ...]:
        """(name, units, units kept by each layer before, units kept after) of each masked group."""
        return tuple(cost[:4] for cost in self._costs)

    @property
    def channels(self) -> Mapping[str, tuple[int, int]]:
        """Masked group -> (before, after) number of kept output channels of all its layers."""
        return {cost.name: cost.channels for cost in self._costs}

    @property
    def macs(self) -> Mapping[str, tuple[int, int]]:
        """Masked group -> (before, after) multiply-accumulates per sample, counting all inputs in both."""
        return {cost.name: cost.macs for cost in self._costs}

    def __str__(self) -> str:
        lines = [f"Mask repair ({self.policy}):"]
        for cost in self._costs:
            kept_per_layer = ", ".join(f"{layer} {kept}" for layer, kept in cost.before.items())
            (channels, channels_after), (macs, macs_after) = cost.channels, cost.macs
            change = f"channels {channels_after - channels:+,}, MACs {macs_after - macs:+,}"
            lines.append(
                f"  {cost.name}: {cost.after} of {cost.units} units stay (masks kept: {kept_per_layer}); {change}"
            )
        return "\n".join(lines)


class RepairedMasks(dict[str, dict[str, Tensor]]):
    """Masks returned by `fix_mask_conflict`, with ``.report``."""

    report: RepairReport


class _Problem:
    """A masked model, evaluated per slot.

    Attributes:
        structure: the slots.
        masks: canonical masks.
        masked: per slot, whether a mask zeros a whole output of a layer that produces it.
        voted: per slot, number of masked layers that produce it.
        closed: per slot, number of these layers that mask it.
    """

    def __init__(self, model: nn.Module, structure: Structure, masks: Mapping[str, Tensor]) -> None:
        graph, rules = structure.graph, structure.rules
        self.structure, self.masks = structure, masks
        stored = canonical_tensors(model, graph)
        under = functools.partial(Constants, graph, rules, stored, repaired=True, amounts=structure.amounts)
        self.constants = under(masks)
        slots = len(self.structure.roots)
        self.voted, self.closed = torch.zeros(slots, dtype=torch.long), torch.zeros(slots, dtype=torch.long)
        seen: set[int] = set()
        for _, c in self.structure.contractions():
            output_slots = self.structure.along(c.output, c.output_dim)
            if output_slots is None or c.weight.index in seen:
                continue
            seen.add(c.weight.index)
            dead = ~self.constants.links(c).outputs().reshape(-1)
            behind = [*graph.sources(c.weight), *filter(None, [self.structure.magnitudes.get(c.weight.index)])]
            if any(source.name in masks for source in behind):
                self.voted.index_add_(0, output_slots, torch.ones_like(output_slots))
                self.closed.index_add_(0, output_slots, dead.long())
        for table, _, output_slots, dead in self._tables():
            if table.name in masks:
                self.voted.index_add_(0, output_slots, torch.ones_like(output_slots))
                self.closed.index_add_(0, output_slots, dead.long())
        self.masked = self.closed > 0
        silent = masks_of_tables(structure, masks, ~(self.masked & (self.closed == self.voted)))  # they have no vote
        constants = self.constants if silent is masks else under(silent)
        use = Use(structure, constants)
        self.needed = alive(structure, consumers(structure, constants, use), use)

    def _tables(self) -> Iterator[tuple[Value, int, Tensor, Tensor]]:
        """Yield each table (an embedding), the dimension of its columns, their slots, and which of them are zero."""
        seen: set[int] = set()
        for node in self.structure.graph.nodes:
            for produced in self.structure.rules.of(node).rare.produces(node):
                output_slots = self.structure.along(produced.input, produced.dim)
                for table, dim in _columns(self.structure, node, output_slots):
                    if table.index not in seen and output_slots is not None:
                        seen.add(table.index)
                        yield table, dim, output_slots, self.constants.along(produced.input, produced.dim) == 0

    @functools.cached_property
    def importance(self) -> Tensor:
        """Per slot, the L1 norm of the weights that produce it, each layer scaled to mean 1.

        Reads every weight, so it is computed only when there is a choice.
        """
        norms = torch.zeros(len(self.structure.roots), dtype=torch.float64)
        seen: set[int] = set()
        for _, c in self.structure.contractions():
            output_slots = self.structure.along(c.output, c.output_dim)
            if output_slots is not None and c.weight.index not in seen:
                seen.add(c.weight.index)
                size = self.constants.magnitude(c)
                norms.index_add_(0, output_slots, size / size.mean().clamp(min=1e-30))
        for table, dim, output_slots, _ in self._tables():
            size = self.constants.magnitude_along(table, dim)
            norms.index_add_(0, output_slots, size / size.mean().clamp(min=1e-30))
        return norms


def _columns(structure: Structure, node: Node, output_slots: Tensor | None) -> Iterator[tuple[Value, int]]:
    """Yield the stored values and dimensions that carry the slots produced by a node."""
    for value in node.inputs:
        for dim in range(value.ndim if value.stored and output_slots is not None else 0):
            row = structure.along(value, dim)
            if row is not None and output_slots is not None and torch.equal(row, output_slots):
                yield value, dim


Policy = Callable[[_Problem], Tensor]


def _union(problem: _Problem) -> Tensor:
    """Keep a unit if any masked layer keeps it."""
    return problem.needed | ~problem.masked


def _intersection(problem: _Problem) -> Tensor:
    """Remove a unit if any layer masks it."""
    return ~(problem.structure.free() & problem.masked)


def _score(problem: _Problem) -> Tensor:
    """Keep the average number of units of a group's masked layers, those with the largest weights."""
    keep = torch.ones_like(problem.masked)
    root = problem.structure.roots == torch.arange(len(keep))
    free = problem.structure.free() & root
    for slots in _rows(problem.structure, free):
        voted = problem.voted[slots].clamp(min=1)
        wanted = round(float((1 - problem.closed[slots] / voted).sum()))
        order = problem.importance[slots].argsort(descending=True, stable=True)
        if problem.masked[slots].any():
            keep[slots[order[max(wanted, 0) :]]] = False
    return keep


def _rows(structure: Structure, free: Tensor) -> Iterator[Tensor]:
    for group in groups_of(structure, ()):
        slots = group.slots
        for row in group.rows.unique().tolist():
            row_slots = slots[(group.rows == row) & free[slots]]
            if len(row_slots):
                yield row_slots


_POLICIES: dict[str, Policy] = {"union": _union, "intersection": _intersection, "score": _score}


def check_policy(policy: str) -> None:
    """Reject an unknown policy with an `InputError` that lists the valid ones."""
    if policy not in tuple(_POLICIES):  # a list cannot be looked up
        raise InputError(f"`policy` is one of {', '.join(_POLICIES)}; got {policy!r}.")


@uncollected()
@own_defaults()
def fix_mask_conflict(
    masks: Any,
    model: nn.Module,
    dummy_input: Any,
    policy: str = "union",
    *,
    graph: Graph | None = None,
    rules: Registry | None = None,
) -> RepairedMasks:
    """Make masks consistent within each dependency group.

    Groups are repaired as a whole. A removed unit is masked in every parameter that produces it (weights, biases,
    norms, depthwise convolutions behind it), but never in the columns of a consumer. A kept unit is restored in layers
    that mask it entirely, while element-wise masks are left as they are. Groups of a convolution and pieces of a chunk
    keep equally many units.

    Args:
        masks: ``{module: {parameter: 0/1 tensor}}``, or the path of a file with such masks; left unchanged.
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        policy: ``"union"`` of the kept units (as in NNI; layers without influence do not count), ``"intersection"``, or
            ``"score"`` (each group keeps its layers' average number of units, those with the largest weights).
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Returns:
        New masks in full parameter shape, expanded where they repeat along a dimension (clone before writing): for all
        parameters in ``masks``, and for all others that have to be masked. ``.report`` lists the changes.

    Raises:
        MaskError: for masks that do not fit the model.
        InputError: for an unknown policy.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
        >>> mask = torch.ones(4, 1, 1, 1)
        >>> mask[0] = 0
        >>> fixed = fix_mask_conflict({"0": {"weight": mask}}, net, torch.zeros(1, 1, 4, 4))
        >>> fixed["1"]["bias"].tolist(), fixed["0"]["bias"].tolist()
        ([0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0])

    NNI: ``nni.compression.pytorch.utils.mask_conflict.fix_mask_conflict``.
    """
    check_policy(policy)
    check_kinds(fix_mask_conflict, locals())
    user_masks = load_masks(masks)
    canonical = canonical_masks(user_masks, model)
    problem = _Problem(model, structure_for(model, dummy_input, graph, rules), canonical)
    keep = _POLICIES[policy](problem) | ~problem.structure.free()
    keep = closed(problem.structure.constraints, keep, lambda: problem.importance)
    repaired = _stored(_extended(problem, keep), user_masks, model)
    for module, entries in user_masks.items():
        for key, mask in entries.items():
            repaired.setdefault(module, {}).setdefault(key, narrowed(mask.detach()).clone().expand(mask.shape))
    find = functools.partial(_costs, problem.structure, problem.masked, keep, _outputs(problem, keep))
    repaired.report = RepairReport(policy, find)
    return repaired


def _extended(problem: _Problem, keep: Tensor) -> dict[str, Tensor]:
    """Return canonical masks after the decision, of size 1 along dimensions that they do not depend on."""
    structure = problem.structure
    stored, table = structure.graph.stored, structure.table
    masks = {name: mask for name, mask in problem.masks.items() if name in stored}
    inner = _input_layers(structure)
    looked = table.look(keep)
    parts, counts = table.parts(looked), table.counts(looked)
    for name, value in stored.items():
        if not (problem.constants.is_parameter(value) or name in structure.masked_tables):
            continue
        for layer, (touched, place) in zip(structure.of(value), table.touched(value.index), strict=True):
            if (value.index, *touched) in structure.unmasked or (value.index, tuple(layer.shape)) in inner:
                continue
            mask = masks.get(name)
            if mask is None and counts[place] == layer.numel():
                continue
            stays = parts[place].view(layer.shape)
            if mask is not None and name in problem.masks:
                mask = mask | _closed_rows(mask, layer) & stays & ~structure.frozen[layer]
            masks[name] = stays if mask is None else mask & stays
    return masks


def _closed_rows(mask: Tensor, layer: Tensor) -> Tensor:
    """Return where a layer's unit is masked in all entries, compact bool; for weights only, whose units are rows."""
    dims = [d for d in range(mask.ndim) if layer.size(d) == 1]
    return ~mask.any(dims, keepdim=True) if dims and mask.ndim > 1 else torch.zeros_like(layer, dtype=torch.bool)


def _input_layers(structure: Structure) -> set[tuple[int, tuple[int, ...]]]:
    """(value, shape of the label array) of weights' input columns, which repair leaves alone."""
    input_layers = set()
    for _, c in structure.contractions():
        for value in structure.graph.sources(c.weight) if not c.depthwise else ():
            if value.index in structure.tables:  # an embedding tied to the last layer produces them as well
                continue
            for layer in structure.of(value):
                rows = support(layer) == (c.stacked,)
                if rows == c.transposed:
                    input_layers.add((value.index, tuple(layer.shape)))
    return input_layers


def _stored(masks: Mapping[str, Tensor], user_masks: Masks, model: nn.Module) -> RepairedMasks:
    """Store canonical masks under every name that the user's masks contain, or under their own name."""
    parameters = stored_tensors(model)
    places: dict[int, list[tuple[str, str]]] = {}
    for module, entries in user_masks.items():
        for key in entries:
            name = parameter_name(module, key, parameters)
            places.setdefault(id(parameters[name or ""]), []).append((module, key))
    repaired = RepairedMasks()
    for name, mask in masks.items():
        module, _, key = name.rpartition(".")
        own = [(module, key.removesuffix("_orig"))]
        for place in places.get(id(parameters[name]), own):
            like = user_masks.get(place[0], {}).get(place[1])
            if like is None:
                like = torch.empty(0, device=parameters[name].device)
            repaired.setdefault(place[0], {})[place[1]] = mask.to(like).expand(parameters[name].shape)
    return repaired


@dataclass(frozen=True, eq=False)
class _Outputs:
    """Outputs of a weight.

    Attributes:
        slots: slot of each output.
        before, after: which outputs the user's and the repaired masks keep.
        macs: multiply-accumulates per sample of one output, over all calls.
    """

    slots: Tensor
    before: Tensor
    after: Tensor
    macs: float

    def of(self, group: Group) -> tuple[int, int]:
        """Return how many outputs of a group are kept before and after."""
        mine = torch.isin(self.slots, group.slots)
        return int((mine & self.before).sum()), int((mine & self.after).sum())


def _costs(
    structure: Structure, masked: Tensor, keep: Tensor, outputs: Mapping[str, list[_Outputs]]
) -> Iterator[_Cost]:
    for group in groups_of(structure, ()):
        if masked[group.slots].any():
            contracting = [layer for layer in group.layers if layer in outputs]  # a table has no vote and no cost
            layer_counts = [(layer, out.macs, out.of(group)) for layer in contracting for out in outputs[layer]]
            kept = {layer: sum(n[0] for name, _, n in layer_counts if name == layer) for layer in contracting}
            channels = (sum(n[0] for _, _, n in layer_counts), sum(n[1] for _, _, n in layer_counts))
            macs = (round(sum(m * n[0] for _, m, n in layer_counts)), round(sum(m * n[1] for _, m, n in layer_counts)))
            yield _Cost(group.name, group.size, kept, int(keep[group.slots].sum()), channels, macs)


def _outputs(problem: _Problem, keep: Tensor) -> dict[str, list[_Outputs]]:
    """Module -> outputs of its weights; a weight called several times counts once, with the MACs of all calls."""
    structure = problem.structure
    batch = max(next((v.shape[0] for v in structure.graph.inputs if v.ndim), 1), 1)
    outputs_by_module: dict[str, dict[int, _Outputs]] = {}
    for node, c in structure.contractions():
        slots = structure.along(c.output, c.output_dim)
        if slots is not None:
            macs = structure.rules.of(node).macs(node, lambda value: value.shape) if node.path == "eval" else 0
            weights = sum(math.prod(other.weight.shape) for other in structure.rules.contractions(node))
            share = macs * math.prod(c.weight.shape) / max(weights, 1)
            own = outputs_by_module.setdefault(node.module, {})
            earlier = own[c.weight.index].macs if c.weight.index in own else 0.0
            before = problem.constants.links(c).outputs().reshape(-1)
            own[c.weight.index] = _Outputs(slots, before, keep[slots], earlier + share / batch / max(len(slots), 1))
    return {module: list(own.values()) for module, own in outputs_by_module.items()}
