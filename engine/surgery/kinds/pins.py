"""Pin single numbers in the forward of one module, where the code's own expression would no longer be right.

The result is installed as a subclass of the owner's class: weights, hooks, other arguments (batch and positions) and
other instances stay as they are. Where what is pinned is the number that a mean over channels divides by, the state
dict has an entry more (`engine.surgery.spans`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from engine.errors import PlanError
from engine.program.graph import Node
from engine.source.sites import Site
from engine.surgery.classes import derived
from engine.surgery.edits import MEAN, STATISTICS, Pin, edited, original, place_of, rebuilt, source_hash
from engine.surgery.exchange import Change, Decision, Exchange
from engine.surgery.spans import span_base

__all__ = ["Pinned", "divisors", "is_pinned", "pin_of", "pinned_class"]


@dataclass(frozen=True, eq=False)
class Pinned(Exchange):
    """A module in whose forward arguments are pinned.

    Attributes:
        pins: the arguments.
    """

    kind = "pins"
    title = "Pinned"
    stage = 0

    pins: tuple[Pin, ...]

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[Pinned]:
        """Yield the modules whose code passes a number that would be wrong."""
        pins = tuple(decision.pins)
        for owner in dict.fromkeys(pin.module for pin in pins):
            yield cls(owner, tuple(replace(pin, module="") for pin in pins if pin.module == owner))

    def state_dict(self) -> dict[str, Any]:
        """Return the exchange as primitives."""
        return {"module": self.module, "pins": [pin.state_dict() for pin in self.pins]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Pinned:
        """Load and validate a state written by `state_dict`."""
        return cls(str(state["module"]), tuple(Pin.from_state_dict(pin) for pin in state["pins"]))

    def __str__(self) -> str:
        return "\n  ".join(f"{pin.function} of {self.module!r} is given the size {pin.value}" for pin in self.pins)

    def then(self, later: Pinned) -> Pinned:
        """Return all pins of both; where both pin one argument, the later one holds."""
        return replace(self, pins=_merged(self.pins, later.pins))

    def prepare(self, change: Change) -> None:
        """Recompile the module's code with the pins.

        Raises:
            PlanError: if the code is not the one that the plan was made for.
        """
        module = change.module(self.module)
        change.become(module, pinned_class(change.class_of(module), self.pins), {})


def pin_of(node: Node, argument: tuple[str, int], value: int | float, owner: type[nn.Module]) -> Pin | None:
    """Return the pin that sets a number of a node's call or operator, or None where the code cannot be edited.

    Args:
        node: the call.
        argument: name and position of the number.
        value: what it has to become.
        owner: class of the module that made the call.
    """
    site: Site | None = node.site
    if site is None or site.end is None:
        return None
    place = place_of(site, argument, node.op)
    pin = None if place is None else _template(site, *place, owner)  # type: ignore[arg-type]
    if pin is None and argument[0] in node.args and site.function == node.op.removesuffix("_with_sizes"):
        sizes = node.args.get(argument[0])
        pin = _template(site, "", argument[1], owner, len(sizes) if isinstance(sizes, Sequence) else 0)  # type: ignore[arg-type]
    return None if pin is None else replace(pin, module=node.module, value=value)


@functools.cache
def _template(site: Site, symbol: str, position: int, owner: Hashable, count: int = 0) -> Pin | None:
    """Return the pin of a call, for no module and value in particular; None where the call cannot be edited.

    ``count``: how many sizes the call was given as a sequence or in its place; 0 for a single number.
    """
    location = _located(site, owner)
    if location is None or site.end is None:
        return None
    function, method = original(location[0]), location[1]
    line = site.end[0] - function.__code__.co_firstlineno
    pin = Pin("", function.__name__, method, source_hash(function), line, site.end[1], symbol, position, 0)
    tree = edited(function, (pin,), count)
    return None if tree is None else pin


def _located(site: Site, owner: Hashable) -> tuple[FunctionType, str] | None:
    """Find the function that makes a call, and the method to rebuild for it.

    This is a method of the owner's class that no subclass has replaced, or a function in the class's file that such a
    method calls by name.
    """
    assert isinstance(owner, type)
    own = _method(site.code, owner)
    if own is not None:
        return own, own.__name__
    caller = None if site.caller is None else _method(site.caller, owner)
    if caller is None or edited(original(caller), ()) is None:
        return None
    for name in caller.__code__.co_names:
        called = caller.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__code__ is site.code and called.__name__ == name:
            return called, caller.__name__
    return None


def _method(code: CodeType, owner: type) -> FunctionType | None:
    method = getattr(owner, code.co_name, None)
    return method if isinstance(method, FunctionType) and method.__code__ is code else None


def _merged(earlier: Iterable[Pin], later: Iterable[Pin]) -> tuple[Pin, ...]:
    """Return the pins of two compactions; where both pin one argument, the later one holds."""
    return tuple({replace(pin, value=0): pin for pin in (*earlier, *later)}.values())


def _pinned(cls: type) -> tuple[type[nn.Module], tuple[Pin, ...]]:
    """Return the class that the user wrote and its pins, without names of modules."""
    class_and_pins: tuple[type[nn.Module], tuple[Pin, ...]] = vars(cls).get("_engine_pinned", (cls, ()))
    return class_and_pins


def is_pinned(cls: type, pin: Pin) -> bool:
    """Whether this argument is already pinned in a class, whatever the number."""
    return replace(pin, module="", value=0) in [replace(other_pin, value=0) for other_pin in _pinned(cls)[1]]


def divisors(cls: type) -> list[float]:
    """Return the divisors of means that are pinned in a class; none if anything else is pinned, too."""
    pins = _pinned(cls)[1]
    return sorted({pin.value for pin in pins}) if all(pin.operator == MEAN for pin in pins) else []


def pinned_class(cls: type[nn.Module], pins: Iterable[Pin]) -> type[nn.Module]:
    """Return a subclass of a module class in which the arguments are pinned; what was pinned before stays pinned.

    Raises:
        PlanError: if the class's code is not the one that the pins were made for.
    """
    cls, earlier = _pinned(cls)
    return _made_class(cls, _merged(earlier, [replace(pin, module="") for pin in pins]))  # type: ignore[arg-type]


@functools.cache
def _made_class(cls: Hashable, pins: tuple[Pin, ...]) -> type[nn.Module]:
    assert isinstance(cls, type)
    methods: dict[str, list[Pin]] = {}
    for pin in pins:
        methods.setdefault(pin.method, []).append(pin)
    members: dict[str, Any] = {name: _rebuilt_method(cls, name, group) for name, group in methods.items()}
    spans = tuple(sorted({pin.value for pin in pins if pin.operator in STATISTICS}))
    own = {"_engine_pinned": (cls, pins), "_engine_spans": spans}
    return derived(cls, {**members, **own}, pinned_class, pins, beside=span_base(cls) if spans else None)


def _rebuilt_method(cls: type, name: str, pins: list[Pin]) -> FunctionType:
    """Return a method with its own calls pinned, calling functions with theirs pinned."""
    method = _pinned_function(getattr(cls, name, None), name, [pin for pin in pins if pin.function == name])
    functions: dict[str, FunctionType] = {}
    for called in dict.fromkeys(pin.function for pin in pins if pin.function != name):
        group = [pin for pin in pins if pin.function == called]
        functions[called] = rebuilt(_pinned_function(method.__globals__.get(called), called, group), group, {})
    return rebuilt(method, [pin for pin in pins if pin.function == name], functions)


def _pinned_function(function: Any, name: str, pins: list[Pin]) -> FunctionType:
    if not isinstance(function, FunctionType) or any(pin.source != source_hash(function) for pin in pins):
        raise PlanError(
            f"The source of {name!r} is not the one that the plan was made for, or its file was edited after it was "
            "imported. Start again with the file as it is."
        )
    return function
