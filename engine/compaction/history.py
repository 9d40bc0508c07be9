"""History of a model's compactions, stored in the model itself, and how to undo them.

A compacted model carries its history: its ``state_dict()`` stores it in the metadata that torch keeps for every module,
so that whatever saves the weights also saves what is needed to load them, without additional keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from engine.compaction.digest import digest
from engine.compaction.format import KEY, VERSION
from engine.program.stored import HISTORY, distinct_modules

__all__ = [
    "Entry",
    "Step",
    "changed",
    "entries_of",
    "entry_of",
    "history",
    "is_compacted",
    "remember",
    "same_steps",
    "snapshot",
    "store_certificate",
    "tell",
]

_CONTAINERS = ("_parameters", "_buffers", "_modules", HISTORY)

Entry = Mapping[str, Any]
"""Stored history of a compacted module: ``{"plans": [...], "certificates": [...]}``, primitives and tensors."""

Outside = Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]]
"""Module name -> class and attributes; in a `Step` only changed ones, without tensors, modules and hooks."""


@dataclass(frozen=True, eq=False)
class Step:
    """A single compaction.

    Attributes:
        plan: state dict of the plan's structure.
        was: previous class and attributes of the modules in which these changed.
        certificate: state dict of the certificate; None if there is none.
    """

    plan: Mapping[str, Any]
    was: Outside
    certificate: Mapping[str, Any] | None = None


def history(model: nn.Module) -> tuple[Step, ...]:
    """Return the compactions of a model, oldest first."""
    steps: tuple[Step, ...] = vars(model).get(HISTORY, ())
    return steps


def is_compacted(model: nn.Module) -> bool:
    """Whether the model or a part of it was compacted."""
    return any(history(module) for module in model.modules())


def remember(model: nn.Module, steps: tuple[Step, ...]) -> Callable[[], None]:
    """Set a model's history; returns a function that undoes it."""
    old = history(model)
    vars(model)[HISTORY] = steps
    is_hooked = tell in model._state_dict_hooks.values()
    handle = None if is_hooked else model.register_state_dict_post_hook(tell)

    def undo() -> None:
        if handle is None:
            vars(model)[HISTORY] = old
        else:
            del vars(model)[HISTORY]
            handle.remove()

    return undo


def store_certificate(model: nn.Module, certificate: Mapping[str, Any]) -> None:
    """Attach the state dict of a certificate to a model's last compaction, to be saved with it."""
    steps = history(model)
    vars(model)[HISTORY] = (*steps[:-1], replace(steps[-1], certificate=certificate))


def entry_of(model: nn.Module) -> Entry:
    """Return a model's history as it is saved."""
    steps = history(model)
    return {"plans": [dict(step.plan) for step in steps], "certificates": [step.certificate for step in steps]}


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """Return the compactions of a model and of modules inside, by path."""
    return {path: entry_of(module) for path, module in model.named_modules() if history(module)}


def tell(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Write a module's history to the metadata of its state dict; a hook of ``state_dict()``."""
    if history(module):
        metadata[KEY] = {"version": VERSION, "compacted": {"": entry_of(module)}, "sha256": None}


def same_steps(steps: tuple[Step, ...], plans: list[Any]) -> int:
    """Return the number of leading steps that match the plans."""
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
    # An unset buffer is None in `_buffers`; plans never change a tensor in an attribute.
    return key not in _CONTAINERS and not key.endswith("_hooks") and not isinstance(value, Tensor)


def _is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two tables hold the same objects under the same names, in the same order."""
    return (
        len(now) == len(before)
        and all(map(operator.is_, now, before))
        and all(map(operator.is_, now.values(), before.values()))
    )


def changed(before: Outside, model: nn.Module) -> Outside:
    """Return the modules of a snapshot that have changed, with their changed attributes."""
    return dict(_changes(before, model))


def _changes(before: Outside, model: nn.Module) -> Iterator[tuple[str, tuple[type[nn.Module], dict[str, Any]]]]:
    modules = distinct_modules(model)
    for name, (kind, attributes) in before.items():
        if name in modules:
            now = vars(modules[name])
            if kind is type(modules[name]) and _is_same(now, attributes):
                continue
            values = {k: v for k, v in attributes.items() if now.get(k) is not v and _is_plain(k, v)}
            if kind is not type(modules[name]) or values:
                yield name, (kind, values)
