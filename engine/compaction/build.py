"""From a model and masks to a plan: trace, propagate, constants, use, decision, slices and folds."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.propagate import Structure
from engine.analysis.use import Use
from engine.compaction.folds import folds_of
from engine.compaction.plan import Plan
from engine.compaction.replace import Replacement, shapes_of
from engine.compaction.slices import Slice, slice_from_mask, slice_from_rows
from engine.compaction.stale import stale
from engine.ops.spread import Spread
from engine.program.garbage import uncollected
from engine.program.graph import Graph, Value
from engine.program.stored import stored_tensors
from engine.recording.probe import channel_inputs, channel_outputs
from engine.recording.recorder import MODULE
from engine.removal.keep import Kept, corrections, decide, only_zeros, refilled
from engine.removal.shrink import Shrunk
from engine.removal.structure import structure_of
from engine.rule import Registry
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
        model: provides the weights; it is only read.
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
    """Whether the compacted model is exact in train mode too, apart from dropout.

    In train mode a norm uses batch statistics, so that a dead channel produces its β. Nothing is lost if that is zero
    at every consumer.
    """
    structure, kept = analysis.structure, analysis.kept
    graph, keep = structure.graph, kept.shrunk.keep
    made_up = corrections(structure, kept.constants, kept.shrunk)  # these hold in any mode
    if {fold.name for fold in analysis.plan.folds} - set(made_up) or any(
        norm.fill is not None for norm in kept.widened
    ):
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


def plan_of(kept: Kept, masks: Mapping[str, Tensor]) -> Plan:
    """Turn a decision into a plan."""
    graph = kept.shrunk.structure.graph
    cuts = {name: _slice(name, value, kept.shrunk) for name, value in graph.stored.items()}
    slices = {name: cut for name, cut in cuts.items() if cut is not None}
    replaced = tuple(_replacements(kept, masks))
    notes = [f"{r.module!r} ({r.kind}) is replaced; a fresh model needs the same replacement." for r in replaced]
    notes += [f"{name!r} is masked as a whole: what it puts out is constant." for name in _dead_layers(kept)]
    attributes = kept.shrunk.attributes()
    notes += stale(graph, slices, attributes)
    return Plan(
        slices=slices,
        masks=_inner_masks(_outside(masks, graph, replaced), slices),
        folds=tuple(folds_of(kept, slices)),
        attributes=attributes,
        headwise=tuple(n for n in sorted(graph.headwise) if any(s.startswith(f"{n}." if n else "") for s in slices)),
        widened=kept.widened,
        spread=tuple(_spread(kept)),
        pins=kept.pins,
        replaced=replaced,
        notes=tuple(dict.fromkeys((*kept.reasons, *graph.notes, *notes))),
    )


def _spread(kept: Kept) -> Iterator[Spread]:
    shrunk = kept.shrunk
    for node, slots, values in refilled(shrunk.structure, kept.constants, kept.use):
        dim = node.args["dim"] % node.output.ndim
        after = shrunk.indices(node.output, dim)
        after = torch.ones(len(slots), dtype=torch.bool) if after is None else after
        spread = Spread.of(node.module, node.args["dim"], shrunk.keep[slots], after, values)
        if spread is not None:
            yield spread


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


def _replacements(kept: Kept, masks: Mapping[str, Tensor]) -> Iterator[Replacement]:
    """Yield the modules that a user's function has to narrow: opaque modules that lose channels."""
    graph, shrunk = kept.shrunk.structure.graph, kept.shrunk
    for name in graph.opaque:
        calls = [node for node in graph.nodes if node.module == name and node.op == MODULE]
        inputs = [channel_inputs(node) for node in calls]
        if any(
            shrunk.mask(v) is not None for node, vs in zip(calls, inputs, strict=True) for v in (*vs, *node.outputs)
        ):
            module = calls[0].args["module"]
            names = {n: graph.aliases[f"{name}.{n}"] for n, _ in module.named_parameters()}
            yield Replacement(
                name,
                graph.types[name].__name__,
                inputs=tuple((_stays(v, shrunk), v.shape) for v in inputs[0]),
                outputs=tuple((_stays(v, shrunk), v.shape) for v in channel_outputs(calls[0])),
                weights={n: masks[canonical] for n, canonical in names.items() if canonical in masks},
                stored=shapes_of(module),
            )


def _stays(value: Value, shrunk: Shrunk) -> Tensor:
    mask = shrunk.mask(value)
    return torch.ones([1] * value.ndim, dtype=torch.bool) if mask is None else mask


def _outside(masks: Mapping[str, Tensor], graph: Graph, replaced: tuple[Replacement, ...]) -> dict[str, Tensor]:
    """Return the masks without those of replaced modules, which are passed to the user's functions."""
    inside = {graph.aliases[f"{r.module}.{name}"] for r in replaced for name in r.weights}
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
