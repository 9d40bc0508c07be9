"""Norms that keep statistics over their full width after some of their channels are removed.

A removed channel was constant (mostly zero) at the input of the norm, so it is filled in again for the computation and
cut off afterwards. This is exact for any ``eps``, in train mode too, and follows the dtype rules of the original norm.
The module object stays the same; its class is exchanged for a subclass with the same parameters, whose state dict says
in one more entry how many channels the statistics span (`engine.surgery.spans`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import PlanError
from engine.program.stored import distinct_modules, modules_of
from engine.surgery.classes import derived, moved
from engine.surgery.exchange import Change, Decision, Exchange
from engine.surgery.full_width import FullGroups, FullWidth, modules_with, norms_over
from engine.surgery.spans import span_base

__all__ = [
    "NarrowedNorm",
    "WideNorm",
    "can_narrow",
    "filled_squares",
    "is_root_mean_square",
    "plain_norms",
    "spans_of",
    "wide_norms",
]


_NORMS = (F.group_norm, F.layer_norm, F.rms_norm)


def can_narrow(cls: Any) -> bool:
    """Whether a module class calls a norm as ``F.layer_norm(x, self.normalized_shape, …)`` in its forward.

    For a group norm the argument is ``self.num_groups``. The function may have been imported by its own name. A forward
    may also delegate to its base class by ``super().forward(x)``.
    """
    return _caller(_plain(cls)) is not None


def _caller(cls: Any) -> type[nn.Module] | None:
    """Return the class whose forward calls the norm: the first one in the MRO that does not delegate to its base."""
    for base in getattr(cls, "__mro__", ()):
        forward = vars(base).get("forward")
        if isinstance(forward, FunctionType) and forward.__code__.co_freevars == ("__class__",):
            if {"super", "forward"} <= set(forward.__code__.co_names):
                continue
        if forward is not None:
            return base if _calls_norm(forward, issubclass(base, nn.GroupNorm)) else None
    return None


def _calls_norm(forward: Any, grouped: bool) -> bool:
    if not isinstance(forward, FunctionType) or forward.__closure__ is not None:
        return False
    names, norms = forward.__code__.co_names, _norms_of(forward)
    if grouped:
        return F.group_norm in norms and "num_groups" in names
    return not norms.isdisjoint({F.layer_norm, F.rms_norm}) and "normalized_shape" in names


def _norms_of(forward: FunctionType) -> set[Callable[..., Tensor]]:
    """Return the functional norms that a forward calls, as attributes of their module or by names of their own."""
    names = forward.__code__.co_names
    held = [forward.__globals__.get(name) for name in names]
    ways = ((F, ()), (nn, ("functional",)), (torch, ("nn", "functional")))
    is_reached = any(value is module and {*way} <= {*names} for module, way in ways for value in held)
    attributes = names if is_reached else ()
    return {norm for norm in _NORMS if norm.__name__ in attributes or any(value is norm for value in held)}


@functools.cache
def _wide_class(cls: Hashable, size: int, with_fill: bool) -> type[nn.Module]:
    assert isinstance(cls, type) and issubclass(cls, nn.Module)
    caller = _caller(cls)
    members = {"_engine_plain": cls, "_engine_size": size, "_engine_spans": (size,)}
    if caller is not None and cls.forward is not caller.forward:  # delegates to the base class
        return derived(cls, members, _wide_class, size, with_fill, beside=_wide_class(caller, size, with_fill))  # type: ignore[arg-type]
    forward = cls.forward
    assert isinstance(forward, FunctionType)
    functional, space = norms_over(size, with_fill), forward.__globals__
    modules = modules_with(functional)
    names: dict[str, Any] = {n: modules[v] for n, v in space.items() if isinstance(v, ModuleType) and v in modules}
    names |= {n: getattr(functional, norm.__name__) for n, v in space.items() for norm in _NORMS if v is norm}
    wide_forward = moved(forward, f"{forward.__qualname__}_{size}{'_filled' * with_fill}", names)
    members |= {"forward": wide_forward}
    return derived(cls, members, _wide_class, size, with_fill, beside=span_base(cls))  # type: ignore[arg-type]


def _plain(cls: Any) -> Any:
    """Return the original class of a norm that lost channels."""
    return vars(cls).get("_engine_plain", cls) if isinstance(cls, type) else cls


def filled_squares(module: nn.Module) -> float:
    """Return the sum of squares of the constants of the channels that a norm over the last dimension lost."""
    fill = getattr(vars(module).get("normalized_shape"), "fill", None)
    return 0.0 if fill is None else float(fill.double().square().sum())


def is_root_mean_square(cls: Any) -> bool:
    """Whether a norm divides by a root mean square, and subtracts no mean.

    Example:
        >>> is_root_mean_square(nn.RMSNorm), is_root_mean_square(nn.LayerNorm)
        (True, False)
    """
    forward = getattr(_caller(_plain(cls)), "forward", None)
    return forward is not None and F.rms_norm in _norms_of(forward)


def spans_of(model: nn.Module) -> dict[str, int]:
    """Return the number of channels that the statistics of each narrowed norm span, by name."""
    return {
        name: vars(type(m))["_engine_size"]
        for name, m in distinct_modules(model).items()
        if "_engine_plain" in vars(type(m))
    }


@dataclass(frozen=True)
class WideNorm:
    """A narrowed norm as it really runs, for programs that were recorded with plain ones.

    Attributes:
        functional: `torch.nn.functional` with its norms.
        span: its normalized shape or number of groups.
    """

    functional: ModuleType
    span: Any

    def run(self, op: str, arguments: Mapping[str, Any]) -> Tensor | None:
        """Return the result of an op with the arguments of the plain norm; None for other ops of the module."""
        norm = getattr(self.functional, op, None)
        if norm is getattr(F, op, None):
            return None
        x, _, *others = (value for name, value in arguments.items() if not name.startswith("cudnn"))
        result: Tensor = norm(x, self.span, *others)  # type: ignore[misc]
        return result


def wide_norms(model: nn.Module) -> dict[str, WideNorm]:
    """Return the narrowed norms of a model by name."""
    norms: dict[str, WideNorm] = {}
    for name, size in spans_of(model).items():
        span = getattr(model.get_submodule(name), _attribute(model.get_submodule(name)))
        norms[name] = WideNorm(norms_over(size, getattr(span, "fill", None) is not None), span)
    return norms


@contextmanager
def plain_norms(model: nn.Module) -> Iterator[None]:
    """Give narrowed norms their original classes inside the context.

    Recorded like this, each is a norm over its remaining channels and may lose more; the removed ones are constant.
    """
    classes = {m: type(m) for _, m in modules_of(model) if "_engine_plain" in vars(type(m))}
    for module in classes:
        module.__class__ = _plain(type(module))
    try:
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls


@dataclass(frozen=True, eq=False)
class NarrowedNorm(Exchange):
    """A norm that lost channels.

    Attributes:
        size: number of channels that the statistics span.
        kept: number of channels that remain.
        fill: constants of the removed channels, ``(size - kept,)``, group by group, or None if all are zero.
        groups: number of channel groups with separate statistics.
        plain: whether it becomes an ordinary norm over the remaining channels, which is a different function.
    """

    kind = "norm"
    title = "Norms"

    size: int
    kept: int
    fill: Tensor | None
    groups: int = 1
    plain: bool = False

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[NarrowedNorm]:
        """Yield the norms that lose constant channels."""
        for module, slots, constants, groups in decision.norms:
            is_removed = ~decision.keep[slots]
            if is_removed.any():
                fill = constants[is_removed]
                yield cls(module, len(is_removed), int((~is_removed).sum()), fill if fill.any() else None, groups)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> NarrowedNorm:
        """Load a state written by `state_dict`."""
        fill, sizes = state["fill"], (int(state["size"]), int(state["kept"]))
        fill = None if fill is None else fill.double()
        return cls(str(state["module"]), *sizes, fill, int(state["groups"]), bool(state["plain"]))

    @property
    def exact(self) -> bool:
        """Whether the statistics stay as they are."""
        return not self.plain

    @property
    def exact_in_train(self) -> bool:
        """Whether only zeros are filled in: any other constant holds until the layer that outputs it is trained."""
        return self.exact and self.fill is None

    def __str__(self) -> str:
        return f"{self.module} keeps the statistics of {self.size} channels"

    def then(self, later: NarrowedNorm) -> NarrowedNorm:
        """Return the norm that loses what both lose."""
        return replace(later, size=self.size, fill=self._with_fill_of(later))

    def _with_fill_of(self, later: NarrowedNorm) -> Tensor | None:
        """Constants of all removed channels, group by group; statistics do not depend on their order."""
        if self.fill is None and later.fill is None:
            return None
        parts = [torch.zeros(n.size - n.kept, dtype=torch.float64) if n.fill is None else n.fill for n in (self, later)]
        return torch.cat([part.view(later.groups, -1) for part in parts], 1).reshape(-1)

    def prepare(self, change: Change) -> None:
        """Exchange the class, so that the narrowed norm spans its full width.

        Raises:
            PlanError: if the module's class cannot be exchanged, or its size does not match.
        """
        module = change.module(self.module)
        own = change.class_of(module)
        if not can_narrow(own) or not self._fits(module):
            raise PlanError(f"{self.module!r} ({own.__name__}) is not a norm over {self.size} channels.")
        if self.fill is not None and self.fill.shape != (self.size - self.kept,):
            raise PlanError(f"The constants of {self.module!r} do not fit: {tuple(self.fill.shape)}.")
        earlier = _earlier(module, own)
        whole = self if earlier is None else earlier.then(self)
        base = _plain(own)
        kind = base if whole.plain else _wide_class(base, whole.size, whole.fill is not None)
        change.become(module, kind, {_attribute(module): whole._span(module)})

    def _fits(self, module: nn.Module) -> bool:
        if isinstance(module, nn.GroupNorm):
            return module.num_channels == self.size > self.kept > 0 and self.kept % module.num_groups == 0
        return tuple(getattr(module, "normalized_shape", ())) == (self.size,) and 0 < self.kept < self.size

    def _span(self, module: nn.Module) -> Any:
        """Return the norm's shape or group count, together with the full width of its statistics."""
        if self.plain:
            return int(module.num_groups) if isinstance(module, nn.GroupNorm) else (self.kept,)
        if not isinstance(module, nn.GroupNorm):
            return FullWidth.of(self.kept, self.size, self.fill)
        return module.num_groups if self.fill is None else FullGroups.of(module.num_groups, self.fill)


def _earlier(module: nn.Module, cls: type) -> NarrowedNorm | None:
    """Return the earlier exchange of a norm that has lost channels."""
    if "_engine_plain" not in vars(cls):
        return None
    span = getattr(module, _attribute(module))
    kept = module.num_channels if isinstance(module, nn.GroupNorm) else span[0]
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else 1
    return NarrowedNorm("", cls._engine_size, int(kept), getattr(span, "fill", None), int(groups))  # type: ignore[attr-defined]


def _attribute(module: nn.Module) -> str:
    return "num_groups" if isinstance(module, nn.GroupNorm) else "normalized_shape"
