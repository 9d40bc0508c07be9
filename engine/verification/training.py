"""One training step of the masked and the compacted model: outputs, gradients, and the state that remains.

The step runs in train mode, forward and backward, on a few small samples; the loss is a random projection of the
outputs. Outputs, the gradients of inputs and of the remaining part of each parameter, and buffers (running statistics)
are compared. Hooks on modules and parameters run, as do custom autograd functions. Random numbers are those of
`EvenDraws`, so that dropout has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from engine.compaction.build import Analysis
from engine.compaction.compact import names_of
from engine.compaction.plan import Plan
from engine.errors import TraceError
from engine.ops.draws import EvenDraws
from engine.ops.products import in_float64
from engine.program.arrays import plain
from engine.program.stored import distinct_modules, stored_tensors
from engine.program.trees import map_tensors
from engine.running.evaluation import evaluating
from engine.running.inputs import call_model
from engine.running.process import seeded
from engine.surgery.kinds.replacements import Replacement
from engine.verification.certificate import Certificate
from engine.verification.infinities import without_infinities
from engine.verification.leftovers import Leftovers
from engine.verification.results import attributes, results_of
from engine.verification.rounding import run_in_float64
from engine.verification.tensors import Recipe, masked_recipes, may_share, small_recipes
from engine.verification.trials import Inputs, Trial, random_inputs, small_inputs

__all__ = ["Step", "TrainingProof", "largest_difference", "training_step"]

_TOLERANCE = {torch.float64: 1e-7}
_COARSE = 1e-3
"""Tolerance if the model does not run in float64."""

_MANY_SAMPLES = 32
"""Of a second step of small networks: units that are zero for all samples pass no gradient back."""

_FLOOR = 1e-6
"""Gradients smaller than this fraction of the largest one are measured against that fraction."""

_TINY = 1e-8
"""Smaller values are measured against this one."""

Call = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True, eq=False)
class Step:
    """What a training step computed.

    Attributes:
        outputs: tensors in the return value, and in attributes that the call set on modules.
        inputs: gradients of the floating-point tensors among the inputs; None for those without one.
        gradients: gradients of the parameters, by canonical name; None for those without one.
        buffers: buffers after the step, by canonical name.
        dropped: whether dropout was switched off.
        leftovers: tensors that hooks in the backward pass keep or read.
    """

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    dropped: bool = False
    leftovers: list[Tensor] = field(default_factory=list)


def training_step(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    inputs: Inputs,
    call: Call = call_model,
    *,
    through: bool = True,
    weights: Collection[tuple[str, str]] = (),
    copied: bool = True,
) -> Step:
    """Run a call in train mode, forward and backward, with other parameters and buffers.

    Args:
        model: the model, which is not changed.
        tensors: parameters and buffers to run it with, by name.
        inputs: positional and keyword arguments.
        call: function of the model and the inputs, by default the forward; it returns a loss, or any tensors.
        through: whether gradients reach the inputs.
        weights: module and name of attributes with tensors computed from parameters alone.
        copied: whether the tensors are copied; otherwise the step may write to those that are not the model's own.

    Raises:
        TraceError: if the model rejects the inputs, or its backward pass fails.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> weight = torch.tensor([[1.0, 2.0]])
        >>> step = training_step(layer, {"weight": weight}, ((torch.tensor([[3.0, 4.0]]),), {}))
        >>> step.outputs[0].tolist(), step.gradients["weight"].div(step.gradients["weight"][0, 0]).tolist()
        ([[11.0]], [[1.0, 1.3333333730697632]])
    """
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() and through):
            return tensor.clone()
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()  # a forward may write into its input

    with evaluating(model), seeded(), torch.inference_mode(False), torch.enable_grad():
        used = _exchange(model, tensors, copied)
        args, kwargs = map_tensors(inputs[0], leaf), map_tensors(dict(inputs[1]), leaf)
        wide = any(t.dtype == torch.float64 for t in tensors.values())
        with EvenDraws(run_in_float64 if wide else in_float64) as draws, Leftovers() as leftovers:
            model.train()
            before = attributes(model)
            out = results_of(call(model, args, kwargs), model, before, weights)
            with leftovers.reading():
                _backward(model, out)
        outputs = [plain(t.detach()).clone() for t in out]
        del out, args, kwargs  # with them goes the graph
        gradients = {name: t.grad for name, t in used.items() if isinstance(t, nn.Parameter)}
        expected = [*(t.grad for t in leaves), *gradients.values(), *used.values(), *_computed(model, weights)]
        return Step(
            outputs=outputs,
            inputs=[t.grad for t in leaves],
            gradients=gradients,
            buffers={name: t.detach() for name, t in used.items() if not isinstance(t, nn.Parameter)},
            dropped=draws.dropped,
            leftovers=leftovers.tensors(expected),
        )


def _computed(model: nn.Module, weights: Collection[tuple[str, str]]) -> list[Tensor | None]:
    return [vars(model.get_submodule(name)).get(key) for name, key in weights]


def _backward(model: nn.Module, outputs: list[Tensor]) -> None:
    """Backpropagate a random direction from each output."""
    roots = [t for t in outputs if t.requires_grad]
    generator = np.random.default_rng(0)  # torch draws equal numbers here, and a softmax passes none of these back
    directions = tuple(torch.as_tensor(generator.standard_normal(tuple(t.shape))).to(t) for t in roots)
    if not roots:
        return
    try:
        # `torch.autograd.backward` would leave the modes that watch the hooks
        _engine_run_backward(tuple(roots), directions, False, False, (), allow_unreachable=True, accumulate_grad=True)
    except Exception as error:  # of a hook or a function of the user's
        raise TraceError(f"The backward of {type(model).__name__} fails: {type(error).__name__}: {error}") from error


def _exchange(model: nn.Module, tensors: Mapping[str, Tensor], copied: bool) -> dict[str, Tensor]:
    """Replace the tensors in a model's tables by copies, under every name; `evaluating` restores the model's own."""
    stored = stored_tensors(model)
    used = {
        name: _stands_for(stored[name], t.clone() if copied or may_share(stored[name], t) else t)
        for name, t in ((name, tensor.detach()) for name, tensor in tensors.items())
    }
    others = {id(stored[name]): tensor for name, tensor in used.items()}
    for module in distinct_modules(model).values():
        for table in (module._parameters, module._buffers):
            table.update({key: others.get(id(t), t) for key, t in table.items()})  # type: ignore[arg-type, misc]
        if isinstance(module, nn.RNNBase):  # it keeps them in a list as well
            module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]  # type: ignore[misc]
    return used


def _stands_for(stored: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the hooks of the parameter that it replaces."""
    if not isinstance(stored, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=stored.requires_grad)
    if stored.requires_grad:
        for hook in (stored._backward_hooks or {}).values():
            parameter.register_hook(hook)
        for hook in (getattr(stored, "_post_accumulate_grad_hooks", None) or {}).values():
            parameter.register_post_accumulate_grad_hook(hook)
    return parameter


# ---------------------------------------------------------------- the comparison


def largest_difference(
    reference: Step,
    compacted: Step,
    plan: Plan,
    masks: Mapping[str, Tensor],
    without: Callable[[str], bool] = lambda name: False,
    used: Callable[[str], Tensor | None] = lambda name: None,
) -> tuple[float, str]:
    """Return the largest relative difference between two training steps, and its place.

    Gradients of remaining unmasked entries are compared. Removed entries that are not masked must have no gradient in
    the masked model, where they would continue to learn.

    Args:
        reference: step of the masked model.
        compacted: step of the compacted model.
        plan: slice of each parameter.
        masks: canonical masks of the parameters before the compaction.
        without: returns whether to skip a parameter or buffer, by name.
        used: returns which entries of an original buffer are used, by name; None for all.
    """
    if [t.shape for t in reference.outputs] != [t.shape for t in compacted.outputs]:
        return math.inf, "the shapes of the outputs"
    gaps = [(_gap(a, b), "an output") for a, b in zip(reference.outputs, compacted.outputs, strict=True)]
    if [t.shape for t in reference.leftovers] != [t.shape for t in compacted.leftovers]:
        return math.inf, "what hooks of the backward keep or read"
    kept = zip(reference.leftovers, compacted.leftovers, strict=True)
    gaps += [(_gap(a, b), "what hooks of the backward keep or read") for a, b in kept]
    for name, before in reference.buffers.items():
        if not without(name) and name in compacted.buffers:
            gaps.append((_state_gap(name, before, compacted.buffers[name], plan, used(name)), f"the buffer {name!r}"))
    pairs = zip(reference.inputs, compacted.inputs, strict=True)
    gradients = [
        (*_difference(*_both(a, b)), "the gradient of an input") for a, b in pairs if a is not None or b is not None
    ]
    for name in reference.gradients:
        if not without(name):
            gradients += _gradient_differences(name, reference, compacted, plan, masks.get(name))
    floor = _FLOOR * max((scale for _, scale, _ in gradients), default=0.0)
    gaps += [(_ratio(difference, max(scale, floor)), where) for difference, scale, where in gradients]
    return max(gaps, key=lambda gap: gap[0], default=(0.0, "nothing"))


def _state_gap(name: str, before: Tensor, after: Tensor, plan: Plan, used: Tensor | None) -> float:
    """Return the difference of a buffer after a step, in the entries that are used."""
    before, after = plain(before), plain(after)
    whole = torch.ones_like(before, dtype=torch.bool) if used is None else used.to(before.device).expand_as(before)
    if name in plan.slices:
        before, whole = plan.slices[name].apply(before), plan.slices[name].apply(whole)
    if before.shape != after.shape:
        return math.inf
    return _gap(before[whole], after[whole])


def _gradient_differences(
    name: str, reference: Step, compacted: Step, plan: Plan, mask: Tensor | None
) -> Iterator[tuple[float, float, str]]:
    """Yield the largest differences of a parameter's gradients, their scales, and their places."""
    before, after, cut = reference.gradients[name], compacted.gradients.get(name), plan.slices.get(name)
    if before is None:
        if after is not None and after.any():
            yield math.inf, 0.0, f"the gradient of {name!r}, which the masked model does not train"
        return
    if cut is None:
        left, removed = before if mask is None else before * mask.to(before), list[Tensor]()
    else:
        left, removed = cut.parts(before, mask)
    inner = plan.masks.get(name)
    after = torch.zeros_like(left) if after is None else after if inner is None else after * inner.to(after)
    difference, scale = _difference(left, after)
    yield difference, scale, f"the gradient of {name!r}"
    yield from ((_peak(part), scale, f"the gradient of what {name!r} loses") for part in removed)


def _both(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two gradients, with zeros in place of a missing one."""
    if one is None and other is not None:
        return torch.zeros_like(other), other
    assert one is not None
    return one, torch.zeros_like(one) if other is None else other


def _peak(tensor: Tensor) -> float:
    """Return the largest magnitude without allocating a tensor of this size; NaN if there is a NaN."""
    if not tensor.numel():
        return 0.0
    if not tensor.is_floating_point():
        return float(tensor.abs().max())
    low, high = tensor.aminmax()
    return max(float(high), -float(low))


def _difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the largest difference, infinite where shapes or dtypes differ, and the largest entry of the first."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf, 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return (0.0 if torch.equal(one, other) else math.inf), 0.0
    one, other = without_infinities(one, other)
    return _peak(one - other), _peak(one)


def _gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest entry of the first."""
    difference, scale = _difference(one, other)
    return _ratio(difference, max(scale, _TINY))


def _ratio(difference: float, scale: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


# ---------------------------------------------------------------- the verdict


class TrainingProof:
    """A training step of the masked model, made before it is changed.

    Args:
        model: the model before the change.
        analysis: the analysis behind the compaction.
        masks: canonical masks, or None if zeros in the weights count.
        batch_dim: batch dimension of the inputs.
        dtype: dtype of the comparison, or None for the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        analysis: Analysis,
        masks: Mapping[str, Tensor] | None,
        batch_dim: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._model, self._plan, self._dtype = model, analysis.plan, dtype
        self._graph, self._use = analysis.structure.graph, analysis.kept.use
        self._recipes = masked_recipes(model, self._graph, masks or {})
        self._masks = masks if masks is not None else {n: r.make(dtype) != 0 for n, r in self._recipes.items()}
        self._rejected = ""
        self._references: list[tuple[Inputs, dict[str, Any], Step]] = []
        whole, counts = self._graph, _counts(self._graph)
        small = replace(whole, args=small_inputs(whole.args), kwargs=small_inputs(dict(whole.kwargs)))
        others = (whole, 1, True), (whole, 2, True), (whole, None, False)
        for graph, samples, through in [*((small, count, True) for count in counts), *others]:
            if self._references and samples not in counts[1:]:
                break
            inputs = random_inputs(graph, Trial(samples, False, dtype), batch_dim)
            options: dict[str, Any] = {"through": through, "weights": self._graph.weights}
            try:
                tensors = {name: recipe.make(dtype) for name, recipe in self._recipes.items()}
                reference = training_step(model, tensors, inputs, copied=False, **options)
                self._references.append((inputs, options, reference))
            except TraceError as error:
                self._rejected = str(error)

    def conclude(self, certificate: Certificate) -> Certificate:
        """Run the step of the compacted model, and withdraw the claim that train mode is exact if the two differ.

        Args:
            certificate: certificate by which train mode is exact, according to the rules.
        """
        if not self._references:
            return _withdrawn(certificate, f"Train mode was not compared: {self._rejected}")
        peaks, dropped = [], False
        for inputs, options, reference in self._references:
            try:
                step = training_step(self._model, self._small(), inputs, copied=False, **options)
            except TraceError as error:
                return _withdrawn(certificate, f"The compacted model does not train as the masked one does: {error}")
            gap, where = largest_difference(reference, step, self._plan, self._masks, self._replaced, self._used)
            if not gap <= _TOLERANCE.get(self._dtype, _COARSE):  # type: ignore[arg-type]
                note = f"in one training step {where} differs by {gap:.1e} from the masked model."
                return _withdrawn(certificate, f"Train mode is not exact: {note}")
            peaks += [_peak(g) for g in reference.gradients.values() if g is not None]
            dropped |= step.dropped
        if peaks and not any(peaks):
            return _withdrawn(certificate, "Train mode was not compared: the gradients of the training step are zero.")
        notes = ("Dropout was left out where train mode was compared.",) if dropped else ()
        return replace(certificate, notes=(*certificate.notes, *notes))

    def _small(self) -> dict[str, Tensor]:
        stored = stored_tensors(self._model)
        recipes = {n: r for n, r in small_recipes(self._recipes, self._plan).items() if not self._replaced(n)}
        if self._plan.of(Replacement):
            recipes |= {n: Recipe(t.detach()) for n, t in names_of(stored) if self._replaced(n)}
        return {name: recipe.make(self._dtype) for name, recipe in recipes.items()}

    def _used(self, name: str) -> Tensor | None:
        value = self._graph.stored.get(name)
        return None if value is None or name in self._graph.written else self._use[value]

    def _replaced(self, name: str) -> bool:
        canonical = self._graph.aliases.get(name, name)
        modules = [f"{module.module}." for module in self._plan.of(Replacement)]
        return any(n.startswith(module) for n in (name, canonical) for module in modules)


def _counts(graph: Any) -> list[int]:
    """Return how many samples the steps have."""
    parameters, numbers = (sum(math.prod(v.shape) for v in values) for values in (graph.stored.values(), graph.inputs))
    return [2, _MANY_SAMPLES] if parameters < 1_000_000 and numbers < 10_000 else [2]


def _withdrawn(certificate: Certificate, note: str) -> Certificate:
    return replace(certificate, exact_in_train=False, notes=(*certificate.notes, note))
