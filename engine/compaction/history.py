"""What was removed from a model so far, remembered by the model itself, and the way back.

A compacted model carries its history: its ``state_dict()`` tells of it in the metadata that torch keeps for every
module, so that whatever saves the weights saves what it takes to load them, with no key more or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from engine.compaction.digest import digest
from engine.program.stored import distinct_modules

__all__ = [
    "KEY",
    "VERSION",
    "Entry",
    "Step",
    "certify",
    "changed",
    "entry_of",
    "history",
    "is_compacted",
    "remember",
    "same_steps",
    "snapshot",
    "tell",
]

KEY = "lightning_compress"
VERSION = 2
_ATTRIBUTE = "_compactions"
_CONTAINERS = ("_parameters", "_buffers", "_modules", _ATTRIBUTE)

Entry = Mapping[str, Any]
"""What is stored of a compacted module: ``{"plans": [...], "certificates": [...]}``, primitives and tensors."""

Outside = Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]]
"""By module name: its class and attributes; of a `Step`, those that changed, without tensors, modules and hooks."""


@dataclass(frozen=True, eq=False)
class Step:
    """One compaction.

    Attributes:
        plan: state dict of the plan's structure.
        was: of the modules whose class or attributes changed, those of before.
        certificate: state dict of the certificate; None where nothing was certified.
    """

    plan: Mapping[str, Any]
    was: Outside
    certificate: Mapping[str, Any] | None = None


def history(model: nn.Module) -> tuple[Step, ...]:
    """Return the compactions of a model, oldest first."""
    found: tuple[Step, ...] = vars(model).get(_ATTRIBUTE, ())
    return found


def is_compacted(model: nn.Module) -> bool:
    """Whether the model or a part of it was compacted."""
    return any(history(module) for module in model.modules())


def remember(model: nn.Module, steps: tuple[Step, ...]) -> Callable[[], None]:
    """Give a model a history; returns what takes it back."""
    old = history(model)
    vars(model)[_ATTRIBUTE] = steps
    told = tell in model._state_dict_hooks.values()
    handle = None if told else model.register_state_dict_post_hook(tell)

    def undo() -> None:
        if handle is None:
            vars(model)[_ATTRIBUTE] = old
        else:
            del vars(model)[_ATTRIBUTE]
            handle.remove()

    return undo


def certify(model: nn.Module, certificate: Mapping[str, Any]) -> None:
    """Keep the state dict of the certificate of a model's last compaction with it, to be stored along."""
    steps = history(model)
    vars(model)[_ATTRIBUTE] = (*steps[:-1], replace(steps[-1], certificate=certificate))


def entry_of(model: nn.Module) -> Entry:
    """Return what is stored of a model's history."""
    steps = history(model)
    return {"plans": [dict(step.plan) for step in steps], "certificates": [step.certificate for step in steps]}


def tell(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Write a module's history into the metadata of its state dict; a hook of ``state_dict()``."""
    if history(module):
        metadata[KEY] = {"version": VERSION, "compacted": {"": entry_of(module)}, "sha256": None}


def same_steps(steps: tuple[Step, ...], plans: list[Any]) -> int:
    """Return how many of the steps are the first of these plans."""
    number = 0
    for step, plan in zip(steps, plans, strict=False):
        if digest(step.plan) != digest(plan):
            break
        number += 1
    return number


def snapshot(model: nn.Module) -> Outside:
    """Return class and attributes of every module."""
    return {name: (type(module), dict(vars(module))) for name, module in distinct_modules(model).items()}


def _is_plain(key: str, value: Any) -> bool:
    # A buffer that is no tensor yet is None in `_buffers`; a tensor in an attribute is nothing that a plan changes.
    return key not in _CONTAINERS and not key.endswith("_hooks") and not isinstance(value, Tensor)


def changed(before: Outside, model: nn.Module) -> Outside:
    """Return of a snapshot the modules that are not as they were, with those attributes only that changed."""
    return dict(_changes(before, model))


def _changes(before: Outside, model: nn.Module) -> Iterator[tuple[str, tuple[type[nn.Module], dict[str, Any]]]]:
    modules = distinct_modules(model)
    for name, (kind, attributes) in before.items():
        if name in modules:
            now = vars(modules[name])
            values = {k: v for k, v in attributes.items() if now.get(k) is not v and _is_plain(k, v)}
            if kind is not type(modules[name]) or values:
                yield name, (kind, values)
