"""Comparison of the shapes inside a compacted model with the predicted ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.compaction.build import Analysis
from engine.errors import TraceError, VerificationError
from engine.program.graph import Graph, Node
from engine.surgery.kinds.norms import NarrowedNorm
from engine.surgery.kinds.replacements import Replacement
from engine.tracer import trace
from engine.verification.certify import Observation
from engine.verification.witness import Witness

__all__ = ["check_run", "check_shapes", "replacement_hint"]


def check_run(witness: Witness, reference: Observation, compacted: Observation) -> None:
    """Compare the output shape of each norm and contraction with the predicted one, at any batch size.

    Raises:
        VerificationError: naming the first node that differs.
    """
    rows = zip(witness.nodes, witness.sizes, reference.shapes, compacted.shapes, strict=True)
    for node, sizes, shape, have in rows:
        if sizes is None or shape is None or len(sizes) != len(shape):
            continue
        want = tuple(n * small // full if full else n for n, (full, small) in zip(shape, sizes, strict=True))
        if have is None:
            raise VerificationError("The compacted model takes another path through its code than the masked one.")
        if have != want:
            raise VerificationError(f"After compaction {node!r} returns the shape {have}; {want} was predicted.")


def replacement_hint(analysis: Analysis) -> str:
    """Return a hint that names the modules that the user replaced, which may have caused an error."""
    replaced = ", ".join(repr(module.module) for module in analysis.plan.of(Replacement))
    return f" Check what `customized_replace_func` returned for {replaced}." if replaced else ""


def check_shapes(model: nn.Module, analysis: Analysis) -> None:
    """Record the compacted model and compare the output shape of each norm and contraction with the predicted one.

    Ops that only move entries are ignored: a slice that has become the whole tensor is another op, or none.

    Raises:
        VerificationError: naming the first node that differs.
    """
    graph, shrunk = analysis.structure.graph, analysis.kept.shrunk
    try:
        ways: Any = {"constants": graph.constants, "dynamic_dims": (), "entries": graph.entries}
        small = trace(model, graph.kwargs or graph.args, opaque=graph.opaque, **ways)
    except TraceError as error:
        raise VerificationError(f"The compacted model does not run: {error}{replacement_hint(analysis)}") from error
    if graph.decided:
        _check_channels(graph, small, analysis)
        return
    paths = ("eval", "train", *(entry.name for entry in graph.entries if entry.name not in graph.on_data))
    runs = [{path: _run_of(g, path, analysis) for path in paths} for g in (graph, small)]
    for path in paths:
        before, after = (len(run[path]) for run in runs)
        if before != after:
            raise VerificationError(
                "The compacted model takes another path through its code than the masked one: the run "
                f"{path!r} has {after} norms and contractions, and had {before}."
            )
    for old, new in (pair for path in runs[0] for pair in zip(runs[0][path], runs[1][path], strict=True)):
        want = [shrunk.shape(v) for v in old.outputs]
        have = [v.shape for v in new.outputs]
        if old.op != new.op or want != have:
            raise VerificationError(f"After compaction {old!r} returns the shapes {have}; {want} were predicted.")


def _check_channels(graph: Graph, small: Graph, analysis: Analysis) -> None:
    """Compare only the channels of each call in the source, if data decide how often it runs, and on how many samples.

    Raises:
        VerificationError: naming the first call that differs.
    """
    structure, shrunk = analysis.structure, analysis.kept.shrunk
    calls: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if _computes(node, analysis):
            calls.setdefault((node.op, node.module, node.site), []).append(node)
    for node in small.nodes:
        recorded = [old.output for old in calls.get((node.op, node.module, node.site), ())]
        rank = range(min((value.ndim for value in recorded), default=0))
        dims = [d for d in rank if all(structure.along(value, d) is not None for value in recorded)]
        sizes = {tuple(shrunk.shape(value)[d] for d in dims) for value in recorded}
        if dims and tuple(node.output.shape[d] for d in dims) not in sizes:
            raise VerificationError(
                f"After compaction {node!r} returns the shape {node.output.shape}; along {dims} {sizes} were predicted."
            )


def _run_of(graph: Graph, path: str, analysis: Analysis) -> list[Node]:
    """Return the norms and contractions of a run; a run that is not recorded was the same as the first."""
    recorded = {node.path for node in graph.nodes} | {entry.name for entry in graph.entries}
    return [n for n in graph.nodes if n.path == (path if path in recorded else "eval") and _computes(n, analysis)]


def _computes(node: Node, analysis: Analysis) -> bool:
    rules = analysis.structure.rules
    wide = {norm.module for norm in analysis.plan.of(NarrowedNorm)}  # inside, such a norm is as wide as before
    computes = rules.of(node).normalises or bool(rules.contractions(node))
    return computes and node.module not in wide
