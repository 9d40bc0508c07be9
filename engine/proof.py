"""Hold a compacted model against the masked one: which runs, in which dtype, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.build import Analysis
from engine.certify import Certificate, Observation, compare, observe
from engine.compact import names_of
from engine.errors import TraceError, VerificationError
from engine.folds import Fold
from engine.graph import Graph, Node
from engine.plan import Plan
from engine.stored import stored_tensors
from engine.tracer import trace
from engine.trees import map_tensors, tensors_in
from engine.witness import Witness

__all__ = ["Proof", "Trial", "random_inputs"]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """One run of both models.

    Attributes:
        batch: batch size, or None for the example's.
        larger: whether dimensions behind the channels are larger than the example's.
        dtype: dtype to compute in, or None for the model's own.
    """

    batch: int | None
    larger: bool
    dtype: torch.dtype | None

    def __str__(self) -> str:
        parts = ["at a larger resolution" if self.larger else "at the example's resolution"]
        parts.append("the example's batch size" if self.batch is None else f"batch size {self.batch}")
        parts.append("the model's own dtype" if self.dtype is None else "float64")
        return ", ".join(parts)


class Proof:
    """Observations of the masked model, made before it is changed.

    What is compared is the plan itself, evaluated in float64 where the model runs in it, so that rounding to the
    model's dtype cannot hide a wrong step; that the stored weights are those numbers, rounded, is checked separately.

    Args:
        model: the model before the change.
        analysis: what is about to be done to it.
        masks: canonical masks.
        batch_dim: batch dimension of the inputs.
        confidence: number of random samples.

    Raises:
        VerificationError: where the masked model runs on no random input.
    """

    def __init__(
        self, model: nn.Module, analysis: Analysis, masks: Mapping[str, Tensor], batch_dim: int, confidence: int
    ) -> None:
        self._model, self._analysis, self._masks = model, analysis, masks
        self._graph, self._batch_dim = analysis.structure.graph, batch_dim
        self._exact = not any(norm.plain for norm in analysis.plan.widened)
        self._witness = Witness.of(analysis) if self._exact else Witness((), (), (), (), self._graph.opaque)
        self._notes: list[str] = []
        self._runs: list[tuple[Inputs, Observation]] = []
        self._dtype: torch.dtype | None = torch.float64
        masked: dict[str, Tensor] = {}
        for dtype in (torch.float64, None):
            masked = masked_tensors(model, self._graph, masks, dtype)
            # a list of pictures is no batch: it runs as it is, if not with more of them
            if self._first_that_runs([Trial(n, False, dtype) for n in (confidence, None)], masked):
                break
        else:
            raise VerificationError("The masked model runs on no random input. " + " ".join(self._notes))
        self._first_that_runs([Trial(n, True, self._dtype) for n in (min(confidence, 2), None)], masked)
        del masked  # the small ones are cut one after the other, so that both are never in memory as a whole
        self._small = small_tensors(_masked(model, self._graph, masks, self._dtype), analysis.plan)

    def _first_that_runs(self, trials: list[Trial], masked: Mapping[str, Tensor]) -> bool:
        for trial in trials:
            inputs = random_inputs(self._graph, trial, self._batch_dim)
            try:
                found = observe(self._model, masked, inputs, self._witness, self._witness.before)
            except TraceError as error:
                self._notes.append(f"Not compared {trial}: {error}")
                continue
            self._runs.append((inputs, found))
            self._dtype = trial.dtype
            return True
        return False

    def conclude(self, certificate: Certificate) -> Certificate:
        """Run the compacted model on the same inputs, and return the certificate with the verdict.

        Raises:
            VerificationError: naming the place of the largest difference.
        """
        check_shapes(self._model, self._analysis)
        self._check_stored()
        own = next((p.dtype for p in self._model.parameters()), torch.float32)
        dtype = self._dtype or own
        tolerance = _TOLERANCE.get(dtype, 1e-4)
        worst, where = max((self._error(*run, tolerance) for run in self._runs), key=lambda found: found[0])
        if self._exact and not worst <= tolerance:
            raise VerificationError(
                f"The compacted model differs from the masked one: relative error {worst:.1e} at {where} (tolerance "
                f"{tolerance:.0e}). The model was left as it was; exclude that layer from pruning, and report this."
            )
        shapes = [tuple(next(tensors_in(inputs)).shape) for inputs, _ in self._runs]
        return replace(
            certificate,
            verified=self._exact,
            max_error=worst,
            tolerance=tolerance,
            dtype=str(dtype).removeprefix("torch."),
            samples=sum(shape[self._batch_dim] if len(shape) > self._batch_dim else 1 for shape in shapes),
            shapes=tuple(shapes),
            compared=len(self._witness.nodes),
            notes=(*certificate.notes, *self._notes),
        )

    def _error(self, inputs: Inputs, reference: Observation, tolerance: float) -> tuple[float, str]:
        try:
            tensors, channels = self._tensors(), self._witness.after
            found = observe(self._model, tensors, inputs, self._witness, channels, reference, tolerance)
        except TraceError as error:
            raise VerificationError(f"The compacted model does not run where the masked one does: {error}") from error
        return compare(reference, found, self._witness, tolerance)

    def _inside(self, name: str) -> bool:
        """Whether a parameter is one of a module that was replaced."""
        return any(name.startswith(f"{module.module}.") for module in self._analysis.plan.replaced)

    def _tensors(self) -> dict[str, Tensor]:
        """What the plan makes of the model's tensors; those of replaced modules as they are."""
        found = {name: t for name, t in self._small.items() if not self._inside(name)}
        for name, tensor in names_of(stored_tensors(self._model)) if self._analysis.plan.replaced else ():
            if self._inside(self._graph.aliases.get(name, name)) or self._inside(name):
                wide = self._dtype is not None and tensor.is_floating_point()
                found[name] = tensor.detach().to(self._dtype) if wide else tensor.detach()
        return found

    def _check_stored(self) -> None:
        """The stored weights are the verified ones, rounded."""
        stored = stored_tensors(self._model)
        for name, wide in self._small.items():
            if self._inside(name):
                continue
            have = stored[name]
            if have.shape != wide.shape or not torch.equal(have, wide.to(have.dtype)):
                raise VerificationError(f"{name!r} does not hold the verified weights after the change; report this.")


def small_tensors(masked: Iterable[tuple[str, Tensor]], plan: Plan) -> dict[str, Tensor]:
    """Return what a plan makes of masked parameters and buffers, in their dtype, one after the other."""
    folds: dict[str, list[Fold]] = {}
    for fold in plan.folds:
        folds.setdefault(fold.name, []).append(fold)
    small = {}
    for name, tensor in masked:
        tensor = plan.slices[name].apply(tensor) if name in plan.slices else tensor
        for fold in folds.get(name, ()):
            tensor = fold.apply(tensor)
        small[name] = tensor
    return small


def _masked(
    model: nn.Module, graph: Graph, masks: Mapping[str, Tensor], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stored_tensors(model).items():
        if graph.aliases.get(name) == name:
            tensor = tensor.detach() if name not in masks else tensor.detach() * masks[name].to(tensor.device)
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def masked_tensors(
    model: nn.Module, graph: Graph, masks: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return ``parameter * mask`` and the buffers by canonical name, floating ones in ``dtype``."""
    return dict(_masked(model, graph, masks, dtype))


def random_inputs(graph: Graph, trial: Trial, batch_dim: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return random inputs like the graph's example inputs.

    Floating tensors get normal noise with the example's mean and deviation (0 and 1 where it is constant); others are
    repeated.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = list(tensors_in((graph.args, graph.kwargs)))
    size = tensors[0].shape[batch_dim] if tensors[0].ndim > batch_dim else None

    def vary(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        batch = trial.batch
        batched = batch is not None and tensor.ndim > batch_dim and shape[batch_dim] == size
        if not tensor.is_floating_point():
            if not batched or batch is None or not size:
                return tensor
            return tensor.index_select(batch_dim, (torch.arange(batch) % size).to(tensor.device))
        if batched and batch is not None:
            shape[batch_dim] = batch
        if trial.larger:
            shape[2:] = [n + 32 if n >= 64 else 2 * n for n in shape[2:]]
        wide = tensor.double()
        mean, deviation = wide.mean(), wide.std(correction=0)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor.device)
        noise = noise * deviation + mean if float(deviation) > 0 else noise
        return noise.to(trial.dtype or tensor.dtype)

    return map_tensors(graph.args, vary), map_tensors(dict(graph.kwargs), vary)


def check_shapes(model: nn.Module, analysis: Analysis) -> None:
    """Record the compacted model and hold what each norm and contraction puts out against the predicted shapes.

    Ops that only move entries are left out: a slice that has become the whole tensor is another op, or none.

    Raises:
        VerificationError: naming the first node that differs.
    """
    graph, shrunk = analysis.structure.graph, analysis.kept.shrunk
    try:
        small = trace(model, graph.kwargs or graph.args, opaque=graph.opaque)
    except TraceError as error:
        replaced = ", ".join(repr(module.module) for module in analysis.plan.replaced)
        hint = f" Check what `customized_replace_func` made of {replaced}." if replaced else ""
        raise VerificationError(f"The compacted model does not run: {error}{hint}") from error
    runs = [{path: _run_of(g, path, analysis) for path in ("eval", "train")} for g in (graph, small)]
    if any(len(runs[0][path]) != len(runs[1][path]) for path in runs[0]):
        raise VerificationError("The compacted model takes another path through its code than the masked one.")
    for old, new in (pair for path in runs[0] for pair in zip(runs[0][path], runs[1][path], strict=True)):
        want = [shrunk.shape(v) for v in old.outputs]
        have = [v.shape for v in new.outputs]
        if old.op != new.op or want != have:
            raise VerificationError(f"After compaction {old!r} gives shapes {have}; {want} were predicted.")


def _run_of(graph: Graph, path: str, analysis: Analysis) -> list[Node]:
    """Return the norms and contractions of a run; one that is not recorded was no other than the first."""
    recorded = {node.path for node in graph.nodes}
    return [n for n in graph.nodes if n.path == (path if path in recorded else "eval") and _computes(n, analysis)]


def _computes(node: Node, analysis: Analysis) -> bool:
    rules = analysis.structure.rules
    wide = {norm.module for norm in analysis.plan.widened}  # inside, such a norm is as wide as before
    computes = rules.rule(node.op).normalises or bool(rules.contractions(node))
    return computes and node.module not in wide
