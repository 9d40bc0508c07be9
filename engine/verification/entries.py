"""Comparison of the entries of the compacted and the masked model: values, writes, and gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from engine.compaction.build import Analysis
from engine.errors import TraceError, VerificationError
from engine.program.entries import Entry
from engine.program.stored import distinct_modules, parameters_of, stored_tensors
from engine.program.trees import map_tensors, results_in
from engine.recording.outer_modules import preserving_outer_modules
from engine.running.evaluation import evaluating
from engine.running.inputs import call_entry
from engine.running.process import random_state, seeded
from engine.surgery.kinds.attention import headwise
from engine.verification.cancellation import floors_by_rounding, least_floors, nudged
from engine.verification.certificate import Certificate
from engine.verification.tensors import Recipe, masked_recipes, small_recipes

__all__ = ["EntryProof"]

_OF_GRADIENTS = "the gradient"

_LOW = 1e-4
"""Allowed relative error of an entry that does not run in float64."""


@dataclass
class _Outcome:
    """The effects of a run of an entry.

    Attributes:
        values: returned tensors.
        written: tensors that it wrote to.
        gradients: by parameter.
        hooked: gradients, and changes of parameters and buffers, after the hooks have run, by kind and name.
        left: other values that hooks leave behind, by description.
        random: random states at the end.
    """

    values: list[Tensor] = field(default_factory=list)
    written: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    hooked: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    random: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Way:
    """How an entry runs: its dtype (None: the model's own), and whether gradients are recorded."""

    dtype: torch.dtype | None
    gradients: bool


class _Retained(TorchFunctionMode):
    """Retains the graph of each ``backward``, for the one after the run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function."""
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            kwargs = {**kwargs, "retain_graph": True}
            if len(args) > 2:
                args = (*args[:2], True, *args[3:])
                kwargs.pop("retain_graph")
        return func(*args, **kwargs)


class EntryProof:
    """Runs of a masked model's entries, made before it is changed.

    Args:
        model: the model before the change.
        analysis: the analysis behind the compaction.
        masks: canonical masks.
        in_train: whether the compaction is meant to be exact in train mode; if not, entries that train are not
            compared.

    Raises:
        VerificationError: if an entry of the masked model does not run.
    """

    def __init__(self, model: nn.Module, analysis: Analysis, masks: Mapping[str, Tensor], in_train: bool) -> None:
        self._model, self._plan = model, analysis.plan
        graph = analysis.structure.graph
        self._written, self._masks = graph.written, masks
        self._recipes = masked_recipes(model, graph, masks)
        self._compared = [entry for entry in graph.entries if in_train or not entry.training]
        self._left = [entry.name for entry in graph.entries if entry.training and not in_train]
        self._runs = [self._first(entry) for entry in self._compared]

    def _first(self, entry: Entry) -> tuple[_Way, _Outcome]:
        """Run the masked model, in float64 and without gradients if possible; entries that train need gradients."""
        errors = []
        for way in (_Way(dtype, grad) for dtype in (torch.float64, None) for grad in (False, True)):
            if entry.training and not way.gradients:
                continue
            try:
                return way, self._outcome(entry, self._recipes, way, self._masks)
            except TraceError as error:
                errors.append(error)
        raise VerificationError(f"The masked model cannot run {entry.name!r}: {errors[-1]}") from errors[-1]

    def conclude(self, certificate: Certificate) -> Certificate:
        """Run the compacted model's entries, and add the result to the certificate.

        Raises:
            VerificationError: naming the entry, and the value that differs.
        """
        small = small_recipes(self._recipes, self._plan)
        errors = {
            entry.name: self._compare(
                entry, way, before, functools.partial(self._after, entry, small, way), certificate.tolerance
            )
            for entry, (way, before) in zip(self._compared, self._runs, strict=True)
        }
        names = tuple(name for name, error in errors.items() if error is not None)
        notes = [
            f"{name!r} draws random numbers that follow the number of channels, and was not compared."
            for name, error in errors.items()
            if error is None
        ]
        notes += [f"{name!r} was not compared: folded constants are not exact in train mode." for name in self._left]
        worst = max([certificate.max_error, *(error for error in errors.values() if error is not None)])
        return replace(certificate, max_error=worst, entries=names, notes=(*certificate.notes, *notes))

    def _after(self, entry: Entry, small: Mapping[str, Recipe], way: _Way, last_digits: bool = False) -> _Outcome:
        try:
            return self._outcome(entry, small, way, self._plan.masks, last_digits)
        except TraceError as error:
            raise VerificationError(f"The compacted model does not run where the masked one does: {error}") from error

    def _compare(
        self, entry: Entry, way: _Way, before: _Outcome, run: Callable[..., _Outcome], tolerance: float
    ) -> float | None:
        """Return the relative error of an entry; None if random numbers differ, and 0 if it ran in low precision.

        Raises:
            VerificationError: if it is too large.
        """
        after = run()
        if entry.training and before.random != after.random:
            return None
        tolerance = tolerance if way.dtype is not None else max(tolerance, _LOW)
        floors = least_floors(before.gradients)
        error, where = self._error(before, after, floors)
        if not error <= tolerance and where.startswith(_OF_GRADIENTS):
            floors |= floors_by_rounding(after.gradients, run(last_digits=True).gradients, tolerance)
            error, where = self._error(before, after, floors)
        if not error <= tolerance:
            raise VerificationError(
                f"The compacted model differs from the masked one in {entry.name!r}: relative error {error:.1e} at "
                f"{where} (tolerance {tolerance:.0e}). The model is unchanged; exclude the layers that {entry.name!r} "
                "reads from pruning, and report this."
            )
        self._compare_hooks(entry, before, after, floors, tolerance)
        self._compare_left(entry, before, after, run, tolerance)
        return error if way.dtype is not None else 0.0

    def _error(self, before: _Outcome, after: _Outcome, floors: Mapping[str, float]) -> tuple[float, str]:
        """Return the largest relative error and its place; floors are the minimum scales of gradients."""
        if [t.shape for t in before.values] != [t.shape for t in after.values]:
            return math.inf, "what it returns, whose shape follows the number of channels"
        errors = [(_relative(a, b), "what it returns") for a, b in zip(before.values, after.values, strict=True)]
        for name in before.written | after.written:
            error = self._gap(name, before.written.get(name), after.written.get(name))
            errors.append((error, f"what it writes to {name!r}"))
        for name in before.gradients | after.gradients:
            pair = before.gradients.get(name), after.gradients.get(name)
            errors.append((self._gap(name, *pair, floors.get(name, 0.0), inner=True), f"{_OF_GRADIENTS} of {name!r}"))
        return max(errors, key=lambda pair: pair[0], default=(0.0, ""))

    def _compare_hooks(
        self, entry: Entry, before: _Outcome, after: _Outcome, floors: Mapping[str, float], tolerance: float
    ) -> None:
        """Refuse a compaction after which hooks change gradients or parameters differently than with masks."""
        least = min(floors.values(), default=0.0)
        for what, name in before.hooked | after.hooked:
            pair = before.hooked.get((what, name)), after.hooked.get((what, name))
            error = self._gap(name, *pair, floors.get(name, least), inner=True)
            if not error <= tolerance:
                raise VerificationError(
                    f"Hooks that run after the gradients of {entry.name!r} change the {what} {name!r} differently than "
                    f"with masks (relative error {error:.1e}): the change depends on other channels, or on their "
                    "number. The model is unchanged. Compact after training, or change each entry independently."
                )

    def _compare_left(
        self, entry: Entry, before: _Outcome, after: _Outcome, again: Callable[[], _Outcome], tolerance: float
    ) -> None:
        """Refuse a compaction after which an entry leaves other numbers or tensors behind than with masks.

        Values that differ between two runs of the compacted model, such as times, are not compared.
        """
        names = sorted({*before.left, *after.left})
        errors = {name: _relative_if_both(before.left.get(name), after.left.get(name)) for name in names}
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        repeated = again().left if wrong else {}
        for name, error in wrong.items():
            one, other = after.left.get(name), repeated.get(name)
            if one is other or _relative_if_both(one, other) == 0:
                raise VerificationError(
                    f"{entry.name!r}, or a hook around it, leaves another value of {name!r} than with masks (relative "
                    f"error {error:.1e}): the value depends on other channels, or on their number. The model is "
                    "unchanged. Compact after training, or compute it from tensors that keep their size."
                )

    def _gap(
        self, name: str, before: Tensor | None, after: Tensor | None, floor: float = 0.0, inner: bool = False
    ) -> float:
        """Return the relative error of what belongs to a parameter or buffer; what a run lacks counts as zeros."""
        cut, mask = self._plan.slices.get(name), self._plan.masks.get(name) if inner else None
        before = before if before is None or cut is None else cut.apply(before)
        one, other = (t if t is None or mask is None else t * mask.to(t.device) for t in (before, after))
        if one is None or other is None:
            return math.inf if any(t is not None and bool(t.count_nonzero()) for t in (one, other)) else 0.0
        return _relative(one, other, floor)

    def _outcome(
        self,
        entry: Entry,
        recipes: Mapping[str, Recipe],
        way: _Way,
        masks: Mapping[str, Tensor],
        last_digits: bool = False,
    ) -> _Outcome:
        """Run an entry with other tensors in the model's tables, and restore the model and its surroundings."""
        model, outcome, dtype = self._model, _Outcome(), way.dtype
        tensors = {name: recipe.make(dtype).clone() for name, recipe in recipes.items()}
        tensors = {name: nudged(tensor) for name, tensor in tensors.items()} if last_digits else tensors
        args, kwargs = (map_tensors(tree, lambda t: _cast(t, dtype)) for tree in (entry.args, dict(entry.kwargs)))
        learning = list(distinct_modules(model).values()) if entry.training else []
        with ExitStack() as scope:
            outer = scope.enter_context(preserving_outer_modules(entry, model))
            scope.enter_context(evaluating(model, learning))
            scope.enter_context(headwise(model))
            scope.enter_context(torch.enable_grad() if way.gradients else torch.inference_mode())
            scope.enter_context(seeded(range(torch.cuda.device_count())))
            scope.enter_context(_default_dtype(dtype))
            with torch.inference_mode(False):
                stored = stored_tensors(model)
                _exchange(model, {id(stored[name]): tensor for name, tensor in tensors.items()})
                for module in outer:
                    _exchange(module, {id(t): _cast(t.detach(), dtype).clone() for t in _own(module, model)})
            _train(model, outer, entry.training)
            if entry.training:
                _mask_gradients(model, masks)
            with _Retained():
                out = call_entry(entry, args, kwargs)
            outcome.random = random_state()
            outcome.values = [t.detach().clone() for t in _returned(out)]
            if entry.training:
                outcome.gradients = {n: g for n, g in _gradients(model, out) if n in recipes}
            now = stored_tensors(model)
            outcome.written = {name: now[name].detach().clone() for name in self._written if name in now}
            if entry.after is not None:
                hooked = _hooked(entry.after, model, outcome.left)
                outcome.hooked = {key: t for key, t in hooked if key[1] in recipes}
        return outcome


def _relative(expected: Tensor, actual: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest number; infinite if only one of the two is finite."""
    if expected.shape != actual.shape:
        return math.inf
    expected, actual = expected.double(), actual.double()
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return math.inf
    expected, actual = expected[finite], actual[finite]
    if not expected.numel():
        return 0.0
    scale, gap = max(float(expected.abs().max()), floor), float((expected - actual).abs().max())
    return gap / scale if scale else (math.inf if gap else 0.0)


def _relative_if_both(expected: Tensor | None, actual: Tensor | None) -> float:
    return math.inf if expected is None or actual is None else _relative(expected, actual)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _own(module: nn.Module, model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module around a model that are not the model's."""
    inside = set(map(id, stored_tensors(model).values()))
    yield from (tensor for tensor in stored_tensors(module).values() if id(tensor) not in inside)


def _exchange(module: nn.Module, others: Mapping[int, Tensor]) -> None:
    """Replace the tensors in the tables of a module and its parts; `evaluating` restores its own."""
    parameters: dict[int, nn.Parameter] = {}
    for part in distinct_modules(module).values():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in others:
                trains = parameter.requires_grad
                new = parameters.setdefault(id(parameter), nn.Parameter(others[id(parameter)], requires_grad=trains))
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = others.get(id(buffer), buffer)


def _train(model: nn.Module, outer: Sequence[nn.Module], training: bool) -> None:
    """Put all modules in the entry's mode, except dropout, which draws as many random numbers as there are channels."""
    for root in (model, *outer):
        for module in distinct_modules(root).values():
            module.training = training and not isinstance(module, _DropoutNd)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make a dtype the default, for new tensors and for code that converts a batch to the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _returned(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that a call returned, and its numbers as tensors."""
    if isinstance(tree, (float, int)) and not isinstance(tree, bool):
        yield torch.tensor(float(tree), dtype=torch.float64)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _returned(item)
    elif isinstance(tree, dict):
        yield from _returned(list(tree.values()))
    else:
        yield from results_in(tree)


def _gradients(model: nn.Module, out: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of each parameter, for the entry's own backward passes and for its results."""
    losses = [t for t in results_in(out) if t.requires_grad]
    total = sum(((t * _weights(t)).sum() for t in losses), torch.zeros(()))
    if losses:
        torch.autograd.backward(total)
    for name, parameter in parameters_of(model).items():
        if parameter.requires_grad:
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _mask_gradients(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Zero the gradients of masked entries as soon as they are computed, as training with masks does."""
    for name, parameter in parameters_of(model).items():
        if name in masks and parameter.requires_grad:
            mask = masks[name].to(parameter)
            parameter.register_post_accumulate_grad_hook(functools.partial(_mask_gradient, mask))


@torch.no_grad()
def _mask_gradient(mask: Tensor, parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(mask)


def _hooked(
    hooks: Callable[[], Any], model: nn.Module, left: dict[str, Tensor]
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Run hooks on gradients; yield the gradients and the changes of stored tensors, and note what hooks return."""
    before = {name: t.detach().clone() for name, t in stored_tensors(model).items() if t.is_floating_point()}
    try:
        result = hooks()
    except Exception as error:
        raise TraceError(f"A hook after its gradients raises {type(error).__name__}: {error}") from error
    left.update((n, torch.as_tensor(v)) for n, v in (result.items() if isinstance(result, dict) else ()))
    for name, parameter in parameters_of(model).items():
        if parameter.grad is not None:
            yield ("gradient of", name), parameter.grad.detach().clone()
    now = stored_tensors(model)
    yield from ((("value of", name), now[name].detach() - tensor) for name, tensor in before.items() if name in now)


def _weights(tensor: Tensor) -> Tensor:
    """Return generic weights for a sum, so that no entry is lost: 1 for a single number."""
    return torch.arange(tensor.numel(), device=tensor.device).to(tensor).cos().view(tensor.shape)
