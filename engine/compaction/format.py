"""File format of a history: its name and version, the storage of a plan's fields, and conversion of older formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.errors import PlanError

__all__ = ["KEY", "VERSION", "Stored", "latest", "stored", "stored_fields", "upgraded"]

KEY = "lightning_compress"
"""Key of a model's history in a checkpoint or in the metadata of a state dict."""

VERSION = 3
"""Version of the history: 1 had one plan, 2 had plans of format 1. The format of plans has a version of its own."""

_STORED = "stored"


@dataclass(frozen=True)
class Stored:
    """Storage of a field of a plan.

    Attributes:
        default: returns the value for plans that lack the field.
        save: converts the value to primitives and tensors, given the index sets shared with other fields.
        load: converts the output of `save` back, given the shared index sets.
        since: first version of the format with the field.
    """

    default: Callable[[], Any]
    save: Callable[[Any, Any], Any]
    load: Callable[[Any, Any], Any]
    since: int


def stored(
    default: Callable[[], Any], save: Callable[[Any, Any], Any], load: Callable[[Any, Any], Any], since: int
) -> Any:
    """Declare a field of a dataclass and its storage; see `Stored`.

    A new field raises the format's version by its ``since``: older releases reject files that have it, and files of
    older formats get its default.
    """
    return field(default_factory=default, metadata={_STORED: Stored(default, save, load, since)})


def stored_fields(plan: Any) -> dict[str, Stored]:
    """Return the storage of each field of a plan or of its class, by name."""
    return {own.name: own.metadata[_STORED] for own in fields(plan)}


def latest(plan: Any) -> int:
    """Return the format version that has all fields of a plan."""
    return max(own.since for own in stored_fields(plan).values())


def upgraded(state: Any, plan: Any) -> dict[str, Any]:
    """Return the state of a plan in the present format, whichever it was written in.

    Args:
        state: what is in the file.
        plan: the class of plans.

    Raises:
        PlanError: if it is not a plan, or is of a newer format, or incomplete.
    """
    version = state.get("format") if isinstance(state, Mapping) else None
    newest = latest(plan)
    if not isinstance(version, int) or version < 1:
        raise PlanError("This is not a compaction plan: it has no format number.")
    if version > newest:
        raise PlanError(f"The plan has format {version}; this version reads up to {newest}. Update the package.")
    later = {name: own.save(own.default(), None) for name, own in stored_fields(plan).items() if own.since > version}
    try:
        return {**later, **(_from_1(state) if version == 1 else state), "format": newest}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"The plan is damaged ({type(error).__name__}: {error}).") from error


def _from_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of format 1, which had one list for each kind of exchange, in format 2."""
    pins: dict[str, list[dict[str, Any]]] = {}
    for pin in state["pins"]:
        own = {"operator": "", **{key: value for key, value in pin.items() if key != "module"}}
        pins.setdefault(str(pin["module"]), []).append(own)
    exchanges: list[dict[str, Any]] = [{"kind": "pins", "module": module, "pins": own} for module, own in pins.items()]
    exchanges += [{"groups": 1, "plain": False, **norm, "kind": "norm"} for norm in state["widened"]]
    exchanges += [{"kind": "attention", "module": str(module)} for module in state["headwise"]]
    exchanges += [{**layer, "kind": "spread"} for layer in state.get("spread", ())]
    exchanges += [{**old, "kind": "replacement", "class_name": old["kind"]} for old in state["replaced"]]
    kept = {key: state[key] for key in ("slices", "masks", "folds", "attributes", "notes")}
    return {**kept, "exchanges": exchanges}
