"""Apply a plan to a model and its optimizers, all or nothing.

Modules, parameters and buffers are the same objects before and after; only their data and some integer attributes are
exchanged, so that references in optimizers, hooks and averaged copies stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.compaction.folds import Fold
from engine.compaction.history import Step, changed, history, snapshot
from engine.compaction.optimizers import check_entrywise, follows, small_state
from engine.compaction.parts import remember
from engine.compaction.replace import Replace, Replacement, places, replaced_by
from engine.compaction.slices import Slice
from engine.errors import PlanError
from engine.ops.heads import headwise_for_good
from engine.ops.padding import unfused
from engine.ops.spread import Spread, spread_out
from engine.ops.wide import Widening, widen
from engine.program.arrays import is_finite
from engine.program.sharded import why_sharded
from engine.program.stored import distinct_modules, stored_tensors
from engine.source.integers import with_integers
from engine.source.pins import Pin, pinned_class

__all__ = ["Compaction", "OptimizerLike", "compacted", "renew", "stored_tensors"]

OptimizerLike = Optimizer | Sequence[Optimizer] | None


class Compaction:
    """A prepared change of a model. All new tensors are computed and checked before any is exchanged.

    Args:
        model: the model to change.
        optimizers: optimizers whose state is narrowed along with the parameters.

    Raises:
        PlanError: if the model's parameters are sharded over several processes.
    """

    def __init__(self, model: nn.Module, optimizers: OptimizerLike = None) -> None:
        sharded = why_sharded(model)
        if sharded is not None:
            raise PlanError(sharded)
        self._undo: list[Callable[[], None]] = []
        self._redo: list[Callable[[], None]] = []
        self._model, self._stored = model, stored_tensors(model)
        self._modules = distinct_modules(model)
        candidates = (None, *([optimizers] if isinstance(optimizers, Optimizer) else optimizers or ()))
        self._tried: set[tuple[int, int, int]] = set()
        self._optimizers = [o for o in candidates if o is not None]
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
                    raise PlanError(f"The plan is of another model: this one has no parameter or buffer {name!r}.")
                self._prepare(name, self._stored[name], slices.get(name), masks.get(name), folded.get(name, []))

    def add_attributes(self, attributes: Mapping[str, Mapping[str, int]]) -> None:
        """Prepare new values of integer attributes.

        Raises:
            PlanError: if a module or its attribute is missing.
        """
        for name, values in attributes.items():
            self._prepare_attributes(name, self._module(name), values)

    def add_classes(self, pins: Sequence[Pin], widened: Sequence[Widening], headwise: Sequence[str]) -> None:
        """Prepare the exchange of classes: pinned arguments, narrowed norms, attention without fixed sizes.

        Raises:
            PlanError: if a module is missing, or its code differs from the code that the plan was made for.
        """
        for owner in dict.fromkeys(pin.module for pin in pins):
            self._prepare_pins(self._module(owner), [pin for pin in pins if pin.module == owner])
        for norm in widened:
            redo, undo = widen(self._module(norm.module), norm)
            self._redo.append(redo)
            self._undo.append(undo)

        for name in headwise:
            self._prepare_attention(name, self._module(name))
        self._prepare_unfused([*(pin.module for pin in pins), *(norm.module for norm in widened), *headwise])

    def add_spread(self, layers: Sequence[Spread]) -> None:
        """Prepare layers that spread their output.

        Raises:
            PlanError: if a module is missing, or spreads its output already.
        """
        for layer in layers:
            redo, undo = spread_out(self._module(layer.module), layer)
            self._redo.append(redo)
            self._undo.append(undo)
        self._prepare_unfused([layer.module for layer in layers])

    def _prepare_unfused(self, exchanged: Sequence[str]) -> None:
        """Prepare torch's encoders that contain exchanged modules, whose code a fused op would bypass."""
        for module, kind, values in unfused(self._modules, exchanged) if exchanged else ():
            self._prepare_outside(module, kind, values)

    def _prepare_attention(self, name: str, module: nn.Module) -> None:
        redo, undo = headwise_for_good(name, module)
        self._redo.append(redo)
        self._undo.append(undo)

    def add_replacements(self, replaced: Sequence[Replacement], functions: Replace) -> None:
        """Prepare modules returned by the user's functions.

        Raises:
            PlanError: if an optimizer would lose a module's parameters, or a function is missing or fails.
        """
        if replaced and self._optimizers:
            raise PlanError(
                f"{replaced[0].module!r} is to be replaced by `customized_replace_func`, and an optimizer would go on "
                "with the old one. Compact without the optimizer, and make a new one afterwards."
            )
        device = next((t.device for t in self._stored.values()), torch.device("cpu"))
        for plan in replaced:
            old = self._module(plan.module)
            new = replaced_by(plan, old, functions, device)
            for table, name in places(self._model, old) if new is not None else ():
                self._redo.append(lambda t=table, n=name, m=new: t.__setitem__(n, m))  # type: ignore[misc]
                self._undo.append(lambda t=table, n=name, m=old: t.__setitem__(n, m))  # type: ignore[misc]

    def _module(self, name: str) -> nn.Module:
        if name not in self._modules:
            raise PlanError(f"The plan is of another model: this one has no module {name!r}.")
        return self._modules[name]

    def _prepare(
        self, name: str, tensor: Tensor, cut: Slice | None, mask: Tensor | None, folds: Sequence[Fold]
    ) -> None:
        new = compacted(name, tensor.detach(), cut, mask, folds)
        self._exchange(tensor, new, _small_gradient(tensor.grad, cut, mask, folds))
        if cut is not None:
            for optimizer in self._optimizers:
                self._prepare_state(name, optimizer, tensor, cut)

    def _exchange(self, tensor: Tensor, new: Tensor, small: Tensor | None) -> None:
        old, gradient = tensor.data, tensor.grad
        self._redo.append(lambda: _swap(tensor, new, small))
        self._undo.append(lambda: _swap(tensor, old, gradient))

    def _prepare_state(self, name: str, optimizer: Optimizer, parameter: Tensor, cut: Slice) -> None:
        state = optimizer.state.get(parameter, {})
        for key, entry in state.items():
            if not isinstance(entry, Tensor) or entry.ndim == 0:
                continue
            if not follows(entry, cut):
                raise PlanError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name!r} in shape {tuple(entry.shape)}, which cannot "
                    f"be cut like the parameter {cut.before}. Compact after training, or use another optimizer."
                )
            new = small_state(entry, cut)
            self._redo.append(lambda s=state, k=key, n=new: s.__setitem__(k, n))  # type: ignore[misc]
            self._undo.append(lambda s=state, k=key, o=entry: s.__setitem__(k, o))  # type: ignore[misc]
        self._check_optimizer(name, optimizer, parameter)

    def _check_optimizer(self, name: str, optimizer: Optimizer, parameter: Tensor) -> None:
        """Test each optimizer once per parameter group and number of dimensions."""
        for number, group in enumerate(optimizer.param_groups):
            key = id(optimizer), number, parameter.ndim
            if key not in self._tried and any(own is parameter for own in group["params"]):
                check_entrywise(optimizer, group, parameter.ndim, name)
                self._tried.add(key)

    def _prepare_attributes(self, path: str, module: nn.Module, values: Mapping[str, int]) -> None:
        attributes = with_integers(path, module, values)
        for key, value in attributes.items():
            old = getattr(module, key)
            self._redo.append(lambda k=key, v=value: setattr(module, k, v))  # type: ignore[misc]
            self._undo.append(lambda k=key, v=old: setattr(module, k, v))  # type: ignore[misc]

    def _prepare_pins(self, module: nn.Module, pins: Sequence[Pin]) -> None:
        new = pinned_class(type(module), pins)
        # A module may choose one of its methods at construction: `self.forward = self.forward_train`.
        chosen = {key: own.__name__ for key, own in vars(module).items() if _is_method_of(module, own)}
        bound = {key: MethodType(getattr(new, name), module) for key, name in chosen.items()}
        self._prepare_outside(module, new, bound)

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
        *older, last = history(self._model)
        if last.plan["replaced"]:
            raise PlanError(
                f"{last.plan['replaced'][0]['module']!r} was replaced by a function, which cannot be taken back. Build "
                "a new instance of the model."
            )
        for name, cut in last.plan["slices"].items():
            tensor = self._stored[name]
            self._exchange(tensor, Slice.from_state_dict(cut).expand(tensor.data), None)
        for name, (kind, values) in last.was.items():
            self._prepare_outside(self._module(name), kind, values)
        self._redo.append(lambda: self._undo.append(remember(self._model, tuple(older))))

    def _prepare_outside(self, module: nn.Module, kind: type[nn.Module], values: Mapping[str, Any]) -> None:
        old_kind, old = type(module), {key: vars(module)[key] for key in values}

        def redo() -> None:
            module.__class__ = kind
            vars(module).update(values)

        def undo() -> None:
            module.__class__ = old_kind
            vars(module).update(old)

        self._redo.append(redo)
        self._undo.append(undo)

    def commit(self) -> None:
        """Apply all prepared changes."""
        before = None if self._plan is None else snapshot(self._model)
        for number, step in enumerate(self._redo):
            try:
                step()
            except BaseException:
                del self._undo[number:]  # undo completed steps only
                raise
        self._flatten()
        if self._plan is not None and before is not None:
            step_made = Step(self._plan, changed(before, self._model), self._certificate)
            self._undo.append(remember(self._model, (*history(self._model), step_made)))

    def rollback(self) -> None:
        """Undo all changes."""
        for step in reversed(self._undo):
            step()
        self._flatten()

    def _flatten(self) -> None:
        """Move the weights of each recurrent layer into one block of memory again, as cuDNN requires."""
        for module in self._modules.values():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def compacted(name: str, tensor: Tensor, cut: Slice | None, mask: Tensor | None, folds: Sequence[Fold]) -> Tensor:
    """Return ``slice(tensor * mask) + fold``.

    Args:
        name: name of the tensor, for messages.
        tensor: tensor before the compaction, without gradient.
        cut: the entries to keep; None keeps all.
        mask: mask in the new shape.
        folds: constants to add.

    Raises:
        PlanError: if the tensor has another shape than the plan was made for.
    """
    if cut is not None and tuple(tensor.shape) != cut.before:
        raise PlanError(
            f"The plan was made when {name!r} had shape {cut.before}; here it has {tuple(tensor.shape)}. "
            "Apply it to the un-compacted model that it was made for."
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
            f"{name!r} cannot take up the constants that removed channels leave: the sum is beyond {new.dtype} "
            f"({torch.finfo(new.dtype).max:.3g}), or not a number. Mask their norms and biases too "
            "(`fix_mask_conflict`), or compact the model in a wider dtype."
        )
    return new


def _is_method_of(module: nn.Module, value: Any) -> bool:
    """Whether a value is a method of the module's class, bound to the module."""
    return (
        isinstance(value, MethodType)
        and value.__self__ is module
        and getattr(type(module), value.__name__, None) is value.__func__
    )


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
