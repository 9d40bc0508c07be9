"""Application of a plan to sharded parameters, one at a time: gather, slice, shard again, free.

Everything else (classes, attributes, buffers, history) is left to `engine.compaction.compact`, for which sharded
parameters are replaced by parameters without data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.compaction.compact import Compaction, compacted
from engine.compaction.follow import compactable
from engine.compaction.history import Entry, history, same_steps
from engine.compaction.optimizers import check_entrywise, check_follows, small_state
from engine.compaction.parts import store_certificate
from engine.compaction.plan import Plan
from engine.compaction.slices import Slice
from engine.errors import CheckpointError, EngineError, PlanError
from engine.program.arrays import is_finite
from engine.program.dtensors import Owners, Resized, owners, parts, placeholders, resharded, spread, whole
from engine.program.stored import parameters_of

__all__ = ["ShardedCompaction", "restore_sharded"]


class ShardedCompaction:
    """A prepared change of a model with sharded parameters; every process has to prepare and commit it.

    Modules and parameters stay the same objects, and so do the tensors of optimizer states that are not sliced.

    Args:
        plan: the plan, on the CPU.
        model: the model to change.
        optimizers: optimizers whose state is sliced with the parameters.

    Raises:
        PlanError: if something does not fit; nothing is changed then.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self._model, self._optimizers = model, optimizers
        self._tried: set[tuple[int, int, int]] = set()
        self._changes: list[Resized] = []
        self._states: list[tuple[dict[Any, Any], Any, Tensor]] = []
        resharded(model)
        with placeholders(model, runs=False):
            self._rest: Compaction = plan.prepare(model)
        try:
            self._prepare(plan)
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def _prepare(self, plan: Plan) -> None:
        parameters, group_of = parameters_of(self._model), owners(self._model)
        folded = {fold.name for fold in plan.folds}
        for name in sorted({*plan.slices, *plan.masks, *folded} & parameters.keys()):
            parameter, cut = parameters[name], plan.slices.get(name)
            if cut is not None:
                _check_even(name, parameter, cut, group_of)
            folds = [fold for fold in plan.folds if fold.name == name]
            full = whole(parameter).detach()
            if not is_finite(full):
                raise PlanError(f"{name!r} contains infinities or NaN, which masks cannot zero.")
            new = compacted(name, full, cut, plan.masks.get(name), folds)
            gradient = None if parameter.grad is None or folds else whole(parameter.grad)
            if gradient is not None:
                gradient = compacted(name, gradient, cut, plan.masks.get(name), [])
            change = Resized.of(parameter, new, gradient, group_of)
            self._changes.append(change)
            if cut is not None:
                for optimizer in self._optimizers:
                    self._prepare_states(name, optimizer, change, cut)

    def _prepare_states(self, name: str, optimizer: Optimizer, change: Resized, cut: Slice) -> None:
        state = optimizer.state.get(change.parameter, {})
        for key, entry in state.items():
            if not isinstance(entry, Tensor) or entry.ndim == 0:
                continue
            check_follows(entry, cut, f"{type(optimizer).__name__} keeps {key!r} of {name!r}")
            self._states.append((state, key, spread(small_state(whole(entry), cut), change.other)))
        for number, group in enumerate(optimizer.param_groups):
            tried = id(optimizer), number, change.parameter.ndim
            if tried not in self._tried and any(own is change.parameter for own in group["params"]):
                check_entrywise(optimizer, group, change.parameter.ndim, name)
                self._tried.add(tried)

    def commit(self) -> None:
        """Apply all prepared changes."""
        undo: list[Callable[[], None]] = []
        try:
            for change in self._changes:
                change.exchange()
                undo.append(change.exchange)
            self._exchange_states()
            undo.append(self._exchange_states)
            undo.append(self._undo_rest)
            with placeholders(self._model, runs=False):
                self._rest.commit()
        except BaseException:
            for step in reversed(undo):
                step()
            raise

    def _undo_rest(self) -> None:
        with placeholders(self._model, runs=False):
            self._rest.rollback()

    def rollback(self) -> None:
        """Undo all changes, once they are committed."""
        resharded(self._model)
        self._undo_rest()
        self._exchange_states()
        for change in reversed(self._changes):
            change.exchange()

    def close(self) -> None:
        """Free the tensors that are not in use."""
        for change in self._changes:
            change.drop()

    def _exchange_states(self) -> None:
        for number, (state, key, entry) in enumerate(self._states):
            self._states[number], state[key] = (state, key, state[key]), entry


def _check_even(name: str, parameter: Tensor, cut: Slice, group_of: Owners) -> None:
    for dim, number in parts(parameter, group_of).items():
        size, before = cut.shape[dim], cut.before[dim]
        if size != before and size % number:
            raise PlanError(
                f"{size} of {before} channels remain along dimension {dim} of {name!r}, which tensor parallelism "
                f"splits into {number} equal parts. Prune to multiples of {number}, in attention of {number} times the "
                "head size (`ChannelPruning(round_to=...)`), or exclude the layer (`exclude=`)."
            )


def restore_sharded(model: nn.Module, wanted: Mapping[str, Entry], optimizers: Sequence[Optimizer] = ()) -> None:
    """Apply the compactions of a checkpoint to a model with sharded parameters, before its values are loaded.

    Args:
        model: a model that went through none or some of the checkpoint's compactions.
        wanted: path in the model -> compactions that the checkpoint went through.
        optimizers: optimizers whose state is sliced, too.

    Raises:
        CheckpointError: if the checkpoint belongs to another model, or is from before a compaction of the model.
    """
    done = {path: history(module) for path, module in model.named_modules() if history(module)}
    for path, steps in done.items():
        if same_steps(steps, wanted[path]["plans"] if path in wanted else []) < len(steps):
            raise CheckpointError(
                f"The checkpoint is from before a compaction of {path!r}, but sharded parameters cannot grow back. "
                "Load it into a newly built module."
            )
    try:
        for path, entry in wanted.items():
            module, number = model.get_submodule(path), len(done.get(path, ()))
            for plan, certificate in list(zip(entry["plans"], entry["certificates"], strict=True))[number:]:
                change = ShardedCompaction(Plan.from_state_dict(plan).structure(), module, optimizers)
                change.commit()
                change.close()
                if certificate is not None:
                    store_certificate(compactable(module), certificate)
    except (EngineError, AttributeError) as error:
        raise CheckpointError(f"The checkpoint belongs to another model: {error}") from error
