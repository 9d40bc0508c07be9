"""Apply a plan to a model and its optimizers, all or nothing.

Modules, parameters and buffers are the same objects before and after; only their data and some integer attributes are
exchanged, so that references in optimizers, hooks and averaged copies stay valid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.compaction.folds import Fold
from engine.compaction.history import Step, changed, history, snapshot
from engine.compaction.optimizers import check_entrywise, check_follows, small_state
from engine.compaction.parts import remember
from engine.compaction.sharing import sharing_of
from engine.compaction.slices import Slice
from engine.errors import InputError, PlanError
from engine.numbers.integers import with_integers
from engine.program.arrays import is_finite, same_entries
from engine.program.sharded import why_sharded
from engine.program.stored import stored_tensors
from engine.surgery.exchange import Change, Replace, Undo
from engine.surgery.kinds import exchanges_from

__all__ = ["Compaction", "OptimizerLike", "compacted", "renew", "separate"]

OptimizerLike = Optimizer | Sequence[Optimizer] | None


class Compaction(Change):
    """A prepared change of a model. All new tensors are computed and checked before any is exchanged.

    Args:
        model: the model to change.
        optimizers: optimizers whose state is narrowed along with the parameters.
        functions: the user's functions that narrow modules, by class name.

    Raises:
        PlanError: if the model's parameters are sharded over several processes.
        InputError: for something else in the place of an optimizer.
    """

    def __init__(self, model: nn.Module, optimizers: OptimizerLike = None, functions: Replace | None = None) -> None:
        sharded = why_sharded(model)
        if sharded is not None:
            raise PlanError(sharded)
        several = optimizers is None or isinstance(optimizers, (list, tuple))
        candidates: Sequence[Any] = optimizers or () if several else [optimizers]  # type: ignore[assignment]
        self._optimizers = [o for o in candidates if o is not None]
        odd = next((o for o in self._optimizers if not hasattr(o, "param_groups")), None)
        if odd is not None:
            raise InputError(f"`optimizer` must be an optimizer, a list of them or None, got {odd!r}.")
        super().__init__(model, functions, bool(self._optimizers))
        self._stored = stored_tensors(model)
        self._sharing = sharing_of(model)
        self._moves: dict[int, Callable[[Tensor], Tensor]] = {}  # by identity of the tensor that changes
        self._tried: set[tuple[int, int, int]] = set()
        self._plan: Mapping[str, Any] | None = None
        self._certificate: Mapping[str, Any] | None = None

    def add_tensors(self, slices: Mapping[str, Slice], masks: Mapping[str, Tensor], folds: Sequence[Fold]) -> None:
        """Prepare ``slice(parameter * mask) + fold``.

        Raises:
            PlanError: if a parameter is missing or has another shape.
        """
        folded: dict[str, list[Fold]] = {}
        for fold in folds:
            folded.setdefault(fold.name, []).append(fold)
        with torch.no_grad():
            for name in sorted({*slices, *masks, *folded}):
                if name not in self._stored:
                    raise PlanError(f"The plan belongs to another model: this one has no parameter or buffer {name!r}.")
                self._prepare(name, self._stored[name], slices.get(name), masks.get(name), folded.get(name, []))

    def add_attributes(self, attributes: Mapping[str, Mapping[str, int]]) -> None:
        """Prepare new values of integer attributes.

        Raises:
            PlanError: if a module or its attribute is missing.
        """
        for path, values in attributes.items():
            module = self.module(path)
            for name, value in with_integers(path, module, values).items():
                self.add(functools.partial(_set_attribute, module, name, value))

    def _prepare(
        self, name: str, tensor: Tensor, cut: Slice | None, mask: Tensor | None, folds: Sequence[Fold]
    ) -> None:
        new = compacted(name, tensor.detach(), cut, mask, folds)
        self.add(functools.partial(_exchange, tensor, new, _small_gradient(tensor.grad, cut, mask, folds)))
        self._moves[id(tensor)] = Tensor.clone if cut is None else cut.apply
        if cut is not None:
            for optimizer in self._optimizers:
                self._prepare_state(name, optimizer, tensor, cut)

    def _prepare_state(self, name: str, optimizer: Optimizer, parameter: Tensor, cut: Slice) -> None:
        state = optimizer.state.get(parameter, {})
        for key, entry in state.items():
            if not isinstance(entry, Tensor) or entry.ndim == 0:
                continue
            check_follows(entry, cut, f"{type(optimizer).__name__} keeps {key!r} of {name!r}")
            self.add(functools.partial(_set_entry, state, key, small_state(entry, cut)))
        self._check_optimizer(name, optimizer, parameter)

    def _check_optimizer(self, name: str, optimizer: Optimizer, parameter: Tensor) -> None:
        """Test each optimizer once per parameter group and number of dimensions."""
        for number, group in enumerate(optimizer.param_groups):
            key = id(optimizer), number, parameter.ndim
            if key not in self._tried and any(own is parameter for own in group["params"]):
                check_entrywise(optimizer, group, parameter.ndim, name)
                self._tried.add(key)

    def add_history(self, plan: Mapping[str, Any], certificate: Mapping[str, Any] | None = None) -> None:
        """Record the plan in the model's history when the change is committed.

        Args:
            plan: state dict of the plan's structure.
            certificate: state dict of its certificate.
        """
        self._plan, self._certificate = plan, certificate

    def add_growth(self) -> None:
        """Prepare to undo the model's last compaction; removed entries become zeros.

        Raises:
            PlanError: if modules were replaced, or a parameter does not have the shape that the compaction gave it.
        """
        *older, last = history(self.model)
        for exchange in exchanges_from(last.plan["exchanges"]):
            if exchange.permanent is not None:
                raise PlanError(exchange.permanent)
            exchange.restore(self)
        for name, cut in last.plan["slices"].items():
            tensor, small = self._stored[name], Slice.from_state_dict(cut)
            self.add(functools.partial(_exchange, tensor, small.expand(tensor.data), None))
            self._moves[id(tensor)] = small.expand
        for name, (kind, values) in last.was.items():
            self.become(self.module(name), kind, values)
        self.add(functools.partial(remember, self.model, tuple(older)))

    def commit(self) -> None:
        """Apply all prepared changes."""
        before = None if self._plan is None else snapshot(self.model)
        super().commit()
        self._share()
        self._flatten()
        if self._plan is not None and before is not None:
            step = Step(self._plan, changed(before, self.model), self._certificate)
            self._taken.append(remember(self.model, (*history(self.model), step)))

    def rollback(self) -> None:
        """Undo all changes."""
        super().rollback()
        self._flatten()

    def _share(self) -> None:
        """Make tensors that shared memory share it again if they hold the same entries."""
        for pair in self._sharing:
            one, other = pair.tensors
            order = None if self._moves.keys().isdisjoint(map(id, pair.tensors)) else pair.order(self._moves)
            if order is not None and same_entries(one.data.permute(order), other.data):
                self._taken.append(_exchange(other, one.data.permute(order), other.grad))

    def _flatten(self) -> None:
        """Move the weights of each recurrent layer back into one block of memory, as cuDNN requires."""
        for module in self.modules.values():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def separate(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Separate tensors that share memory if the values that are about to be loaded differ.

    Args:
        model: the model that loads the values.
        values: values by name.
    """
    for pair in sharing_of(model):
        one, other = (values.get(name) for name in pair.names)
        order = pair.order({}) if isinstance(one, Tensor) and isinstance(other, Tensor) else None
        if order is not None and not same_entries(one.permute(order), other):  # type: ignore[union-attr, arg-type]
            tensor = pair.tensors[1]
            _exchange(tensor, tensor.data.clone(), tensor.grad)


def compacted(name: str, tensor: Tensor, cut: Slice | None, mask: Tensor | None, folds: Sequence[Fold]) -> Tensor:
    """Return ``slice(tensor * mask) + fold``.

    Args:
        name: name of the tensor, for messages.
        tensor: tensor before the compaction, without gradient.
        cut: the entries to keep; None keeps all.
        mask: mask in the new shape.
        folds: constants to add.

    Raises:
        PlanError: if the tensor does not have the shape that the plan was made for.
    """
    if cut is not None and tuple(tensor.shape) != cut.before:
        raise PlanError(
            f"The plan was made for {name!r} of shape {cut.before}, but here it has {tuple(tensor.shape)}. Apply the "
            "plan to the uncompacted model that it was made for."
        )
    new = tensor if cut is None else cut.apply(tensor)
    if mask is not None:
        if torch.broadcast_shapes(mask.shape, new.shape) != new.shape:
            raise PlanError(f"The mask of {name!r} has shape {tuple(mask.shape)}, not {tuple(new.shape)}.")
        new = new * mask.to(new.device)
    for fold in folds:
        new = fold.apply(new)
    if folds and not is_finite(new):
        raise PlanError(
            f"{name!r} cannot absorb the constants of removed channels: the sum exceeds {new.dtype} "
            f"({torch.finfo(new.dtype).max:.3g}), or is not a number. Mask their norms and biases too "
            "(`fix_mask_conflict`), or compact the model in a wider dtype."
        )
    return new


def _set_attribute(module: nn.Module, name: str, value: Any) -> Undo:
    old = getattr(module, name)
    setattr(module, name, value)
    return functools.partial(setattr, module, name, old)


def _set_entry(state: dict[str, Any], key: str, value: Tensor) -> Undo:
    old = state[key]
    state[key] = value
    return functools.partial(state.__setitem__, key, old)


def _exchange(tensor: Tensor, data: Tensor, gradient: Tensor | None) -> Undo:
    undo = functools.partial(_swap, tensor, tensor.data, tensor.grad)
    _swap(tensor, data, gradient)
    return undo


def _small_gradient(
    gradient: Tensor | None, cut: Slice | None, mask: Tensor | None, folds: Sequence[Fold]
) -> Tensor | None:
    """Return the narrowed accumulated gradient; None for a tensor with folds."""
    if gradient is None or folds:
        return None
    small = gradient if cut is None else cut.apply(gradient)
    return small if mask is None else small * mask.to(small.device)


def _swap(tensor: Tensor, data: Tensor, gradient: Tensor | None = None) -> None:
    """Exchange the data of a tensor in place.

    The detour through another dtype renews autograd's gradient accumulator, which would keep the old shape.
    """
    tensor.grad = None
    detour = torch.float16 if data.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=detour, device=data.device)
    tensor.data = data
    tensor.grad = gradient


def renew(parameter: Tensor) -> None:
    """Give a parameter a new gradient accumulator without hooks; data and gradient stay the same."""
    _swap(parameter, parameter.data, parameter.grad)


def names_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor once, under its first name."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
