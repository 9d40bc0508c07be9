"""From a model and masks to a plan: trace, propagate, constants, use, decision, slices and folds."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.use import Use
from engine.compaction.folds import folds_of
from engine.compaction.plan import Plan
from engine.compaction.slices import Slice, slice_from_mask, slice_from_rows
from engine.compaction.stale import stale
from engine.program.garbage import uncollected
from engine.program.graph import Graph, Value
from engine.program.stored import stored_tensors
from engine.removal.keep import Kept, decide, only_zeros, refilled
from engine.removal.propagate import Structure
from engine.removal.shrink import Shrunk
from engine.removal.structure import structure_of
from engine.rule import Registry
from engine.surgery.exchange import Decision, Exchange, Refill
from engine.surgery.kinds import exchanges_of
from engine.tracer import trace

__all__ = ["Analysis", "analyse", "exact_in_train", "plan_of"]


@dataclass(frozen=True, eq=False)
class Analysis:
    """Result of analysing a masked model.

    Attributes:
        structure: slots of the model.
        kept: the slots that are kept.
        plan: how to remove the others.
    """

    structure: Structure
    kept: Kept
    plan: Plan


def canonical_tensors(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Return parameters and buffers of a model by the canonical names of a graph."""
    return {name: t for name, t in stored_tensors(model).items() if graph.aliases.get(name) == name}


@uncollected()
def analyse(model: nn.Module, graph: Graph, rules: Registry, masks: Mapping[str, Tensor] | None) -> Analysis:
    """Decide what can be removed from a masked model, and build a plan for it.

    Args:
        model: the model, whose weights are read.
        graph: recorded program of the model.
        rules: op rules.
        masks: canonical masks, or None to read zeros from the weights.

    Raises:
        StaleGraphError: if the graph does not match the current shapes of the model.
    """
    graph.check_fresh(model)
    structure = structure_of(graph, rules)
    constants = Constants(graph, rules, canonical_tensors(model, graph), masks, amounts=structure.amounts)
    kept = decide(structure, constants, Use(structure, constants))
    if kept.pins and not graph.explored:  # nodes of other resolutions have to be pinned, too
        return analyse(model, graph.derived("explored", functools.partial(_explored, model, graph)), rules, masks)
    return Analysis(structure, kept, plan_of(kept, masks or {}))


def _explored(model: nn.Module, graph: Graph) -> Graph:
    """Record a model again, including a larger resolution."""
    example, dims = graph.kwargs or graph.args, graph.dynamic_dims
    options: Any = {"constants": graph.constants, "dynamic_dims": dims, "entries": graph.entries}
    options |= {"opaque": graph.opaque, "spread": graph.spread}
    return trace(model, example, explore=True, **options)


def exact_in_train(analysis: Analysis, model: nn.Module, masks: Mapping[str, Tensor] | None) -> bool:
    """Whether the compacted model is also exact in train mode, apart from dropout.

    In train mode a norm uses batch statistics, so a dead channel outputs its β, which has to be zero at every consumer.
    A weight that was corrected for what it lost (the length of a weight norm) has other gradients.
    """
    structure, kept = analysis.structure, analysis.kept
    graph, keep = structure.graph, kept.shrunk.keep
    if analysis.plan.folds or not all(exchange.exact_in_train for exchange in analysis.plan.exchanges):
        return False
    stored = canonical_tensors(model, graph)
    constants = Constants(
        graph, structure.rules, stored, masks, training=True, base=kept.constants, amounts=structure.amounts
    )
    zeros = [*only_zeros(structure, constants, kept.use)]
    zeros += [(slots, values) for _, slots, values in refilled(structure, constants, kept.use)]
    if any((values != 0)[~keep[slots]].any() for slots, values in zeros):
        return False
    return not any(
        (constants.along(c.contraction.input, c.contraction.input_dim) != 0)[c.used & ~keep[c.slots]].any()
        for c in kept.consumers
    )


def _decision(kept: Kept, masks: Mapping[str, Tensor], narrowed: Collection[str]) -> Decision:
    shrunk = kept.shrunk
    return Decision(
        shrunk.structure.graph, masks, narrowed, shrunk.keep, shrunk.mask, kept.norms, kept.pins, [*_refills(kept)]
    )


def _refills(kept: Kept) -> Iterator[Refill]:
    shrunk = kept.shrunk
    for node, slots, values in refilled(shrunk.structure, kept.constants, kept.use):
        after = shrunk.indices(node.output, node.args["dim"] % node.output.ndim)
        everything = torch.ones(len(slots), dtype=torch.bool)
        yield Refill(node, shrunk.keep[slots], everything if after is None else after, values)


def plan_of(kept: Kept, masks: Mapping[str, Tensor]) -> Plan:
    """Turn a decision into a plan."""
    graph = kept.shrunk.structure.graph
    cuts = {name: _slice(name, value, kept.shrunk) for name, value in graph.stored.items()}
    slices = {name: cut for name, cut in cuts.items() if cut is not None}
    exchanges = exchanges_of(_decision(kept, masks, slices))
    notes = [note for exchange in exchanges for note in exchange.notes]
    notes += [f"{name!r} is completely masked, so its output is constant." for name in _dead_layers(kept)]
    attributes = kept.shrunk.attributes()
    notes += stale(graph, slices, attributes)
    return Plan(
        slices=slices,
        masks=_inner_masks(_outside(masks, graph, exchanges), slices),
        folds=tuple(folds_of(kept, slices)),
        attributes=attributes,
        exchanges=exchanges,
        notes=tuple(dict.fromkeys((*kept.reasons, *graph.notes, *notes))),
    )


def _dead_layers(kept: Kept) -> Iterator[str]:
    """Yield the names of layers without remaining weights, except recurrent ones."""
    for node, c in kept.shrunk.structure.contractions():
        if c.output is not c.weight and not kept.constants.links(c).outputs().any():
            yield node.module


def _slice(name: str, value: Value, shrunk: Shrunk) -> Slice | None:
    rows = shrunk.rows(value)
    if rows is not None:
        return slice_from_rows(value.shape, rows)
    mask = shrunk.mask(value)
    return None if mask is None else slice_from_mask(value.shape, mask, name)


def _outside(masks: Mapping[str, Tensor], graph: Graph, exchanges: Iterable[Exchange]) -> dict[str, Tensor]:
    """Return the masks without those that exchanges apply themselves."""
    inside = {graph.aliases[name] for exchange in exchanges for name in exchange.masked}
    return {name: mask for name, mask in masks.items() if name not in inside}


def _inner_masks(masks: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> dict[str, Tensor]:
    """Return the masks of kept entries, for parameters in which any is masked."""
    inner = {}
    for name, mask in masks.items():
        if not mask.all():
            rest = slices[name].apply_compact(mask) if name in slices else mask
            if not rest.all():
                inner[name] = rest.contiguous()
    return inner
