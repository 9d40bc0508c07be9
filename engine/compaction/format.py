"""What is written to files: the name and number of a history, how a field of a plan is stored, and older formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.errors import PlanError

__all__ = ["KEY", "VERSION", "Stored", "latest", "stored", "stored_fields", "upgraded"]

KEY = "lightning_compress"
"""Under which a checkpoint, or the metadata of a state dict, holds the history of a model."""

VERSION = 3
"""Of this history: 1 had one plan, 2 had plans of format 1. Fields of a plan have numbers of their own."""

_STORED = "stored"


@dataclass(frozen=True)
class Stored:
    """How a field of a plan is stored.

    Attributes:
        default: returns its value in plans that lack it.
        save: returns it as primitives and tensors; takes the value, and the index sets shared with other fields.
        load: returns the value; takes what `save` returned, and the shared index sets.
        since: number of the format that has it first.
    """

    default: Callable[[], Any]
    save: Callable[[Any, Any], Any]
    load: Callable[[Any, Any], Any]
    since: int


def stored(
    default: Callable[[], Any], save: Callable[[Any, Any], Any], load: Callable[[Any, Any], Any], since: int
) -> Any:
    """Return a field of a dataclass that says how it is stored; see `Stored`.

    A new field raises the format's number by its ``since``: older versions refuse files that have it, and files of
    older formats get its default.
    """
    return field(default_factory=default, metadata={_STORED: Stored(default, save, load, since)})


def stored_fields(plan: Any) -> dict[str, Stored]:
    """Return how each field of a plan, or of its class, is stored, by name."""
    return {own.name: own.metadata[_STORED] for own in fields(plan)}


def latest(plan: Any) -> int:
    """Return the number of the format that has all fields of a plan."""
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
