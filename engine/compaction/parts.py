"""History of the submodules of a compacted model, so that a submodule cannot be saved without it.

The history is stored in the module that was compacted, often a LightningModule, but users save submodules:
``torch.save(module.model.state_dict())``. Each submodule with narrowed tensors therefore writes its share of the plans
to the metadata of its own state dict. ``save_pretrained``, which cannot store plans and writes the old configuration,
raises an error instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from engine.compaction import history as whole
from engine.compaction.format import KEY, VERSION
from engine.compaction.history import Entry, Step, history
from engine.errors import CheckpointError
from engine.program.stored import PART, distinct_modules

__all__ = ["part_entry", "refuse", "remember", "store_certificate"]

_SAVE = "save_pretrained"
_DEEPEST = 12  # calls between `save_pretrained` and the hook of `state_dict`


def remember(model: nn.Module, steps: tuple[Step, ...]) -> Callable[[], None]:
    """Set the history of a model and its submodules; returns a function that undoes it."""
    undo = [whole.remember(model, steps), *_share_history(model, steps)]

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def store_certificate(model: nn.Module, certificate: Mapping[str, Any]) -> None:
    """Attach the state dict of a certificate to the last compaction of a model and its submodules."""
    whole.store_certificate(model, certificate)
    _share_history(model, history(model))


def part_entry(model: nn.Module) -> Entry | None:
    """Return the share of a submodule in the plans of the compacted model; None if it has none."""
    prefix, steps = vars(model).get(PART, ("", ()))
    plans = [_within(step.plan, prefix) for step in steps]
    if not any(plan["slices"] for plan in plans):
        return None
    return {"plans": plans, "certificates": [step.certificate for step in steps]}


def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Stand in for ``save_pretrained`` of a compacted model.

    Raises:
        CheckpointError: always, with what to call instead.
    """
    raise CheckpointError(
        "`save_pretrained` of a compacted model would write the old configuration, which does not describe the small "
        "network. Call `lightning_compress.save_pretrained(model, directory)`, which derives the new one, or save "
        "`model.state_dict()`, which contains the plan, with `torch.save`."
    )


def _share_history(model: nn.Module, steps: tuple[Step, ...]) -> list[Callable[[], None]]:
    undo = []
    for name, module in distinct_modules(model).items():
        if name:
            undo.append(_set(module, PART, (f"{name}.", steps) if steps else None))
        undo += _hooked(module)
        if callable(getattr(type(module), _SAVE, None)):
            undo.append(_set(module, _SAVE, refuse if steps else None))
    return undo


def _set(module: nn.Module, key: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module, or delete it if the value is None."""
    old = vars(module).get(key)
    if value is not None:
        vars(module)[key] = value
    else:
        vars(module).pop(key, None)
    return functools.partial(_set, module, key, old)  # type: ignore[return-value]


def _hooked(module: nn.Module) -> list[Callable[[], None]]:
    if _write_share in module._state_dict_hooks.values():
        return []
    return [module.register_state_dict_post_hook(_write_share).remove]


def _write_share(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Write a submodule's share of the plans to the metadata of its own state dict, but not of the whole model's.

    Raises:
        CheckpointError: if ``save_pretrained`` requests the state dict, even if a class calls it internally.
    """
    entry = None if history(module) else part_entry(module)
    if (history(module) or entry is not None) and _is_saving():
        refuse()
    if entry is not None and not prefix:
        metadata[KEY] = {"version": VERSION, "compacted": {"": entry}, "sha256": None}


def _is_saving() -> bool:
    """Whether ``save_pretrained`` of the module, or of an enclosing model, requests the state dict."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if frame.f_code.co_name == _SAVE and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def _within(plan: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the part of a plan's state dict that concerns a submodule, in its own names."""
    return {key: value if key == "notes" else _share(value, prefix) for key, value in plan.items()}


def _share(value: Any, prefix: str) -> Any:
    if isinstance(value, Mapping):
        return {_relative(name, prefix): item for name, item in value.items() if _is_inside(name, prefix)}
    if not isinstance(value, list):
        return value
    return [_renamed(item, prefix) for item in value if _is_inside(_name_of(item), prefix)]


def _name_of(item: Any) -> str:
    return item if isinstance(item, str) else str(item["module"])


def _renamed(item: Any, prefix: str) -> Any:
    name = _relative(_name_of(item), prefix)
    return name if isinstance(item, str) else {**item, "module": name}


def _is_inside(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(prefix)


def _relative(name: str, prefix: str) -> str:
    return f"{name}.".removeprefix(prefix).removesuffix(".")
