"""Comparison of a compacted model with the masked one: the choice of runs and dtype, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.alternatives.axes import Axis
from engine.compaction.build import Analysis
from engine.compaction.compact import names_of
from engine.errors import TraceError, VerificationError
from engine.ops.analytic import is_analytic
from engine.program.arrays import same_entries
from engine.program.stored import parameters_of, stored_tensors
from engine.program.trees import tensors_in
from engine.surgery.kinds.replacements import Replacement
from engine.verification.certificate import TOLERANCE, Certificate
from engine.verification.certify import Observation, observe
from engine.verification.comparison import compare
from engine.verification.memory import give_back
from engine.verification.remains import writes
from engine.verification.resizing import Sizes
from engine.verification.shapes import check_run, check_shapes, replacement_hint
from engine.verification.tensors import Recipe, masked_recipes, run_tensors, small_recipes
from engine.verification.trials import Inputs, Trial, agree, not_compared, random_inputs, sample_bytes, sample_work
from engine.verification.witness import Witness

__all__ = ["Proof"]

_SLACK = 3.0
"""Multiple of the model's own rounding error, measured in one run, by which runs in half precision may differ."""

_FREE = 20 * 2**20
"""Minimum memory budget of a run in bytes; for larger models, it is the size of the weights."""

_HEAVY = 2**30
"""Number of multiplications per sample above which the minimum number of samples runs."""


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of the masked model.

    Attributes:
        trial: the settings of the run.
        shape: shape of its first input.
        observation: the observed values.
    """

    trial: Trial
    shape: tuple[int, ...]
    observation: Observation


class Proof:
    """Observations of the masked model, made before it is changed.

    The plan itself is compared, evaluated in float64 if the model runs in it, so that rounding to the model's dtype
    cannot hide a wrong step; a separate check confirms that the stored weights are these numbers, rounded.

    Samples run in groups if all at once would take more memory than the weights: at half the resolution if the model
    accepts that, and one of them at the example's. At least two run together in any case, and one of them runs again
    beside others: if its outputs depend on these (batch statistics), all run at once after all. For an analytic
    function that takes long, only two samples run (`ops/analytic.py`).

    Args:
        model: the model before the change.
        analysis: the analysis behind the compaction.
        masks: canonical masks.
        batch_dim: batch dimension of the inputs.
        confidence: number of random samples.

    Raises:
        VerificationError: if the masked model accepts no random input.
    """

    def __init__(
        self, model: nn.Module, analysis: Analysis, masks: Mapping[str, Tensor], batch_dim: int, confidence: int
    ) -> None:
        self._model, self._analysis = model, analysis
        self._graph, self._batch_dim = analysis.structure.graph, batch_dim
        heavy = sample_work(self._graph, analysis.structure.rules, batch_dim) > _HEAVY
        self._few = heavy and is_analytic(self._graph)  # one sample is as informative as many
        self._confidence = min(confidence, 2) if self._few else confidence
        self._exact = all(exchange.exact for exchange in analysis.plan.exchanges)
        opaque = self._graph.opaque
        self._witness = (
            Witness.of(analysis) if self._exact else Witness((), (), (), (), opaque=opaque, weights=self._graph.weights)
        )
        self._rejected: list[tuple[Trial, str]] = []
        self._runs: list[_Run] = []
        self._independent = False  # whether a sample's outputs are known not to depend on the others
        self._resolution: tuple[Any, ...] = (False, False, ())  # of the run before
        self._masked = masked_recipes(model, self._graph, masks)
        self._dtype: torch.dtype | None
        own = _own_dtype(model)
        for dtype in (torch.float64, *([torch.float32] if own.itemsize < torch.float32.itemsize else []), None):
            tensors = run_tensors(model, self._graph, self._masked, dtype, masked=True)
            # a list of pictures is not a batch: it runs as it is, if not with more of them
            self._dtype, self._runs, self._independent = dtype, [], False
            if self._run_samples(dtype, tensors) or self._attempt(Trial(None, False, dtype), tensors):
                break
        else:
            raise VerificationError(
                "The masked model accepts no random input. " + " ".join(not_compared(self._rejected))
            )
        self._limit = self._usual_tolerance()
        if self._exact and (dtype or own).itemsize < torch.float32.itemsize:
            self._limit = self._calibrated(self._runs[0], tensors)
        together = any(run.trial.batch is not None for run in self._runs)
        sizes = Sizes.of(self._graph, analysis.structure.rules, batch_dim, together)
        larger = self._run_resized(sizes, dtype, tensors)
        if not larger and self._graph.dynamic_dims is not None and sizes.sides:
            self._attempt(Trial(None, False, dtype, resized=tuple(sizes.only_said.items())), tensors)
        elif not larger and self._graph.dynamic_dims is None and self._has_resolution:
            self._run_larger(dtype, tensors)
        if writes(self._graph) or any(run.observation.leaves for run in self._runs):
            self._run_again(dtype, tensors)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the comparison, or None for the model's own."""
        return self._dtype

    @property
    def _has_resolution(self) -> bool:
        """Whether an input has dimensions behind the channels."""
        inputs = tensors_in((self._graph.args, self._graph.kwargs))
        return any(t.is_floating_point() and t.ndim > 2 for t in inputs)

    def _run_samples(self, dtype: torch.dtype | None, tensors: Mapping[str, Tensor]) -> bool:
        """Run all samples at the example's resolution; return False if the model rejects them."""
        count, most = self._confidence, self._samples_per_run(Trial(None, False, dtype))
        if count <= most and not self._few:
            return self._attempt(Trial(count, False, dtype), tensors)
        group = self._run_batched(Trial(2 if self._few else max(most, 2), False, dtype), tensors)
        if group is None:
            return False
        last = (group.batch or 1) - 1
        self._independent = self._repeats(replace(group, batch=min(most, count - last), first=last), tensors)
        if not self._independent:
            return self._attempt(Trial(count, False, dtype), tensors) or not group.smaller
        ran = self._attempt(Trial(1, False, dtype), tensors) if group.smaller else True
        most = self._samples_per_run(group)
        for n in range(last + min(most, count - last), count, most):
            self._attempt(replace(group, batch=min(most, count - n), first=n), tensors)
        return ran or not group.smaller

    def _run_batched(self, group: Trial, tensors: Mapping[str, Tensor]) -> Trial | None:
        """Run a group of samples, at half the resolution if the model accepts it, which takes a quarter of the time."""
        half, reject_count = replace(group, smaller=True), len(self._rejected)
        if self._has_resolution:
            if self._attempt(half, tensors):
                return half
            del self._rejected[reject_count:]
        return group if self._attempt(group, tensors) else None

    def _repeats(self, trial: Trial, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the first sample of a run has the same outputs as when it was the last one of the previous run."""
        before, reject_count = self._runs[-1].observation.outputs, len(self._rejected)
        if not self._attempt(trial, tensors):
            del self._rejected[reject_count:]  # so all of them run at once
            return False
        outputs, tolerance = self._runs[-1].observation.outputs, self._usual_tolerance()
        if agree(before, outputs, trial.first, self._batch_dim, tolerance):
            return True
        self._runs.pop()
        return False

    def _run_larger(self, dtype: torch.dtype | None, tensors: Mapping[str, Tensor]) -> None:
        """Run up to two samples at a larger resolution if the model accepts it."""
        # samples that run separately are large: one suffices, larger along one side
        trials = [Trial(1, True, dtype, wider=True)] if self._independent else []
        for trial in (*trials, Trial(min(self._confidence, 2), True, dtype), Trial(None, True, dtype)):
            reject_count = len(self._rejected)
            if self._attempt(trial, tensors):
                return
            if trial.wider:
                del self._rejected[reject_count:]

    def _run_resized(self, sizes: Sizes, dtype: torch.dtype | None, tensors: Mapping[str, Tensor]) -> bool:
        """Run the example's batch at other sizes; of the rejected ones, only the first and batch size 1 are reported.

        Returns:
            Whether larger sizes ran; if samples run separately, only the last dimension is larger.
        """
        reject_count = len(self._rejected)

        def attempt(resized: Mapping[Axis, int]) -> bool:
            return self._attempt(Trial(None, False, dtype, resized=tuple(resized.items())), tensors)

        alone = any(run.trial.batch == 1 for run in self._runs)
        larger = sizes.explore(attempt, alone, all_larger=not self._independent)
        later = self._rejected[reject_count + 1 :]
        self._rejected[reject_count + 1 :] = [r for r in later if all(axis.batch for axis, _ in r[0].resized)]
        return larger

    def _run_again(self, dtype: torch.dtype | None, tensors: Mapping[str, Tensor]) -> None:
        """Run two consecutive calls, because the first leaves something behind for the second."""
        samples = min(self._confidence, 2)
        for batch in (samples, None):
            if self._attempt(Trial(batch, False, dtype, calls=2), tensors):
                return

    def _inputs(self, trial: Trial) -> list[Inputs]:
        """Return the inputs of each call."""
        return [random_inputs(self._graph, trial, self._batch_dim, call) for call in range(trial.calls)]

    def _samples_per_run(self, trial: Trial) -> int:
        """Return the number of samples that fit the memory budget of a run."""
        return max(int(1 / self._share(trial)), 1)

    def _share(self, trial: Trial) -> float:
        """Return the fraction of a run's memory budget that one sample takes."""
        weights = {id(p): p.numel() * p.element_size() for p in parameters_of(self._model).values()}
        need = sample_bytes(self._graph, self._analysis.structure.rules, self._batch_dim, trial)
        return max(need, 1) / max(_FREE, sum(weights.values()), 1)

    def _attempt(self, trial: Trial, tensors: Mapping[str, Tensor]) -> bool:
        self._free_earlier_runs(trial)
        inputs, *further = self._inputs(trial)
        look = (self._witness, self._witness.looks[0])
        try:
            observation = observe(self._model, tensors, inputs, *look, None, 0.0, *further)
        except TraceError as error:
            self._rejected.append((trial, str(error)))
            return False
        shape = tuple(next(tensors_in(inputs)).shape)
        if trial.resized and not observation.finite:
            self._rejected.append((trial, "numbers that are not finite"))
            return False
        if self._runs and _has_other_samples(self._runs[0], shape, observation):
            self._rejected.append(
                (trial, "a different number of samples, as if a fixed width turned positions into samples")
            )
            return False
        self._runs.append(_Run(trial, shape, observation))
        return True

    def _free_earlier_runs(self, trial: Trial) -> None:
        """Free the memory of earlier runs if they had another resolution, or if this run is large."""
        resolution, large = trial.place, (trial.batch or 1) > 1 or self._share(trial) > 1
        if self._independent and (resolution != self._resolution or large):
            give_back()
        self._resolution = resolution

    def _usual_tolerance(self) -> float:
        """Return the tolerance of the dtype; for half precision, the maximum that `_calibrated` may return."""
        return TOLERANCE.get(self._dtype or _own_dtype(self._model), 1e-4)

    def _calibrated(self, run: _Run, tensors: Mapping[str, Tensor]) -> float:
        """Return the tolerance for half precision, based on how much the model amplifies rounding.

        The masked model runs once more with each weight changed by up to half a unit in its last place, as rounding
        changes every sum. The relative change of the compared values is the model's own rounding error.
        """
        generator = torch.Generator().manual_seed(0)

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            noise = torch.rand(tensor.shape, generator=generator).sub_(0.5).mul_(torch.finfo(tensor.dtype).eps)
            return (tensor.float() * noise.add_(1).to(tensor.device)).to(tensor.dtype)

        look = (self._witness, self._witness.looks[0])
        rounded = {name: moved(tensor) for name, tensor in tensors.items()}
        observation = observe(self._model, rounded, self._inputs(run.trial)[0], *look, None, 0.0)
        rounding, _ = compare(run.observation, observation, self._witness, self._limit)
        return min(self._limit, max(_SLACK * rounding, TOLERANCE[torch.float32]))

    def conclude(self, certificate: Certificate) -> Certificate:
        """Run the compacted model on the same inputs, and return the certificate with the verdict.

        Raises:
            VerificationError: naming the place of the largest difference.
        """
        check_shapes(self._model, self._analysis)
        tensors = run_tensors(self._model, self._graph, self._stored(), self._dtype, masked=False)
        tolerance = self._limit
        worst, where = max((self._error(run, tensors, tolerance) for run in self._runs), key=lambda error: error[0])
        if self._exact and not worst <= tolerance:
            raise VerificationError(
                f"The compacted model differs from the masked one: relative error {worst:.1e} at {where} (tolerance "
                f"{tolerance:.0e}). The model is unchanged; exclude that layer from pruning, and report this."
            )
        return replace(
            certificate,
            verified=self._exact,
            max_error=worst,
            tolerance=tolerance,
            dtype=str(self._dtype or _own_dtype(self._model)).removeprefix("torch."),
            samples=self._samples(),
            shapes=tuple(run.shape for run in self._runs),
            compared=sum(dim >= 0 for dim in self._witness.dims),
            notes=(
                *certificate.notes,
                *not_compared(self._rejected, certificate.notes),
                *self._diverged(),
                *self._drawn(),
            ),
        )

    def _drawn(self) -> Iterator[str]:
        """Yield a note on ops that draw random numbers, since a narrower model draws different ones."""
        for node in self._witness.draws[:1]:
            yield (
                f"{node!r} draws one random number per channel in eval mode, so two calls of either model differ. They "
                "were compared with the same number for all channels, and without dropout."
            )

    def _diverged(self) -> Iterator[str]:
        """Yield a note on runs in which only outputs were compared."""
        count = sum(any(call.diverged for call in run.observation.calls) for run in self._runs)
        if count and self._exact:
            runs = f"In {count} of {len(self._runs)} runs"
            yield (
                f"{runs} the model took another path through its code than on the example; inside the network, only "
                "modules that run once on both paths were compared there."
            )

    def _samples(self) -> int:
        """Return the number of different samples; each belongs to one resolution."""
        last: dict[tuple[Any, ...], int] = {}
        for run in self._runs:
            resolution = run.trial.place
            size = run.shape[self._batch_dim] if len(run.shape) > self._batch_dim else 1
            last[resolution] = max(last.get(resolution, 0), run.trial.first + size)
        return sum(last.values())

    def _error(self, run: _Run, tensors: Mapping[str, Tensor], tolerance: float) -> tuple[float, str]:
        self._free_earlier_runs(run.trial)
        inputs, *further = self._inputs(run.trial)
        look = (self._witness, self._witness.looks[1])
        try:
            observation = observe(self._model, tensors, inputs, *look, run.observation, tolerance, *further)
        except TraceError as error:
            raise VerificationError(
                f"The compacted model does not run where the masked one does: {error}{replacement_hint(self._analysis)}"
            ) from error
        if not any(run.trial.place):
            check_run(self._witness, run.observation, observation)
        return compare(run.observation, observation, self._witness, tolerance)

    def _inside(self, name: str) -> bool:
        """Whether a parameter belongs to a replaced module."""
        return any(name.startswith(f"{module.module}.") for module in self._analysis.plan.of(Replacement))

    def _stored(self) -> dict[str, Recipe]:
        """Check the stored weights against the planned ones, and return the latter.

        The stored weights are the planned ones, rounded; without folds nothing is rounded, and they are equal. Weights
        of replaced modules are not checked.
        """
        stored, recipes = stored_tensors(self._model), {}
        for name, recipe in small_recipes(self._masked, self._analysis.plan).items():
            if self._inside(name):
                continue
            have, want = stored[name].detach(), recipe.make(self._dtype if recipe.folds else None)
            if have.shape != want.shape or not same_entries(have, want.to(have.dtype)):
                raise VerificationError(f"{name!r} does not hold the verified weights after the change; report this.")
            recipes[name] = Recipe(want if recipe.folds else have)
        for name, tensor in names_of(stored) if self._analysis.plan.of(Replacement) else ():
            if self._inside(self._graph.aliases.get(name, name)) or self._inside(name):
                recipes[name] = Recipe(tensor.detach())
        return recipes


def _own_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.float32)


def _has_other_samples(first: _Run, shape: Sequence[int], observation: Observation) -> bool:
    """Whether an output has as many rows as its input has samples in one run, but not in one at another size.

    ``x.view(-1, self.size)`` accepts larger pictures and makes several samples of each, which no model is meant to do.
    """
    pairs = zip(first.observation.outputs, observation.outputs, strict=False)
    return shape[1:] != first.shape[1:] and any(
        old.ndim and new.ndim and old.shape[0] == first.shape[0] and new.shape[0] != shape[0] for old, new in pairs
    )
