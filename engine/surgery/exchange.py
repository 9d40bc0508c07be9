"""What all exchanges of a module's class share: how they are planned, prepared, committed, undone, stored and printed.

A kind of exchange is one class in one file of `engine.surgery.kinds`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MethodType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.program.graph import Graph, Node, Value
from engine.program.stored import distinct_modules, stored_tensors
from engine.surgery.edits import Pin
from engine.surgery.encoders import unfused

__all__ = ["Change", "Decision", "Exchange", "Refill", "Replace", "Span", "Undo"]

Undo = Callable[[], None]
Replace = Mapping[str, Callable[..., nn.Module]]
"""Class name -> function of (module, (input, output, weight masks)) that returns the narrowed module."""

_ABSENT = object()


class Span(NamedTuple):
    """A norm over channels: the slot and the constant of each, NaN where it varies, and the number of groups."""

    module: str
    slots: Tensor
    constants: Tensor
    groups: int


class Refill(NamedTuple):
    """A node that fills in constants along a dimension: which channels it receives, which it returns, the constants."""

    node: Node
    before: Tensor
    after: Tensor
    constants: Tensor


@dataclass(frozen=True, eq=False)
class Decision:
    """What an analysis has decided, as far as exchanges are planned from it.

    Attributes:
        graph: the recorded program.
        masks: canonical masks.
        narrowed: names of the parameters and buffers that are narrowed.
        keep: bool per slot, whether it is kept.
        mask: returns the entries of a value that are kept, as a compact bool array; None if all are.
        norms: the norms over removable channels.
        pins: arguments in the code that have to be pinned.
        refills: nodes that fill in constants.
    """

    graph: Graph
    masks: Mapping[str, Tensor]
    narrowed: Collection[str]
    keep: Tensor
    mask: Callable[[Value], Tensor | None]
    norms: Collection[Span]
    pins: Collection[Pin]
    refills: Collection[Refill]


class Change:
    """A prepared change of a model: everything is computed and checked before the first step is taken.

    Args:
        model: the model to change.
        functions: the user's functions that narrow modules, by class name.
        trained: whether optimizers are narrowed along with the model.

    Attributes:
        model, functions, trained: as passed.
        modules: the model's modules by name.
    """

    def __init__(self, model: nn.Module, functions: Replace | None = None, trained: bool = False) -> None:
        self.model, self.functions, self.trained = model, functions or {}, trained
        self.modules = distinct_modules(model)
        self._steps: list[Callable[[], Undo]] = []
        self._taken: list[Undo] = []
        self._classes: dict[nn.Module, type[nn.Module]] = {}

    @property
    def device(self) -> torch.device:
        """Device of the model's first tensor."""
        return next((tensor.device for tensor in stored_tensors(self.model).values()), torch.device("cpu"))

    def module(self, name: str) -> nn.Module:
        """Return a module of the model by name.

        Raises:
            PlanError: if there is none.
        """
        if name not in self.modules:
            raise PlanError(f"The plan belongs to another model: this one has no module {name!r}.")
        return self.modules[name]

    def class_of(self, module: nn.Module) -> type[nn.Module]:
        """Return the class that a module will have after the steps prepared so far."""
        return self._classes.get(module, type(module))

    def add(self, step: Callable[[], Undo]) -> None:
        """Add a step: a function that changes something and returns the function that undoes it."""
        self._steps.append(step)

    def become(self, module: nn.Module, kind: type[nn.Module], values: Mapping[str, Any]) -> None:
        """Prepare another class and other attributes of a module.

        A method of its class that the module holds in an attribute (``self.forward = self.forward_train``) is taken
        from the new class.
        """
        own = self.class_of(module)
        chosen = {k: method.__name__ for k, method in vars(module).items() if _is_method_of(module, method)}
        bound = {k: MethodType(getattr(kind, name), module) for k, name in chosen.items() if kind is not own}
        self._classes[module] = kind
        self.add(functools.partial(_become, module, kind, {**bound, **values}))

    def add_exchanges(self, exchanges: Collection[Exchange]) -> None:
        """Prepare exchanges, and the encoders of torch around them, whose fused code would bypass them.

        Raises:
            PlanError: if one does not fit the model.
        """
        for exchange in exchanges:
            exchange.prepare(self)
        for module, kind, values in unfused(self.modules, [exchange.module for exchange in exchanges]):
            self.become(module, kind, values)

    def commit(self) -> None:
        """Take all steps; after an error, `rollback` undoes those taken."""
        for step in self._steps:
            self._taken.append(step())

    def rollback(self) -> None:
        """Undo all steps taken."""
        while self._taken:
            self._taken.pop()()


def _become(module: nn.Module, kind: type[nn.Module], values: Mapping[str, Any]) -> Undo:
    old = type(module), {key: vars(module).get(key, _ABSENT) for key in values}
    _set(module, kind, values)
    return functools.partial(_set, module, *old)


def _set(module: nn.Module, kind: type[nn.Module], values: Mapping[str, Any]) -> None:
    module.__class__ = kind
    vars(module).update(values)
    for key in [key for key, value in values.items() if value is _ABSENT]:
        del vars(module)[key]


def _is_method_of(module: nn.Module, value: Any) -> bool:
    """Whether a value is a method of the module's class, bound to the module."""
    return (
        isinstance(value, MethodType)
        and value.__self__ is module
        and getattr(type(module), value.__name__, None) is value.__func__
    )


@dataclass(frozen=True, eq=False)
class Exchange(ABC):
    """A change of one module beyond its tensors and integers, usually of its class.

    Attributes:
        module: name of the module.
        kind: name of the kind in files.
        title: heading of the kind when a plan is printed.
        stage: kinds of a lower stage are prepared first. Stage 0 edits the code of a class, 1 exchanges the class, 2
            wraps whichever class the module has by then, and 3 replaces the module.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    stage: ClassVar[int] = 1

    module: str

    @classmethod
    @abstractmethod
    def planned(cls, decision: Decision) -> Iterator[Self]:
        """Yield the exchanges of this kind that a decision requires."""

    @abstractmethod
    def prepare(self, change: Change) -> None:
        """Compute and check everything, and add the steps.

        Raises:
            PlanError: if the exchange does not fit the module.
        """

    def restore(self, change: Change) -> None:  # noqa: B027
        """Add what undoes the exchange beyond class and attributes of the module."""

    @abstractmethod
    def __str__(self) -> str: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the exchange as primitives and tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    @abstractmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Load and validate a state written by `state_dict`."""

    @property
    def exact(self) -> bool:
        """Whether the compacted model computes the same function."""
        return True

    @property
    def exact_in_train(self) -> bool:
        """Whether it does so in train mode too."""
        return self.exact

    @property
    def masked(self) -> Iterable[str]:
        """Names in the model of the parameters whose masks the exchange applies itself."""
        return ()

    @property
    def permanent(self) -> str | None:
        """Why the exchange cannot be undone in a model that was loaded; None if it can."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the plan."""
        return ()

    def structure(self) -> Self:
        """Return the exchange without what depends on weights."""
        return self

    def then(self, later: Self) -> Self:
        """Return the exchange that is equivalent to this one followed by a later one of the same module."""
        return later

    def renamed(self, module: str) -> Self:
        """Return the exchange under another name of its module."""
        return replace(self, module=module)
