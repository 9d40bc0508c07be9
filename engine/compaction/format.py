"""What is written to files: the format's name and numbers, and the way from released formats to the present one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import PlanError

__all__ = ["FORMAT", "KEY", "VERSION", "upgraded"]

KEY = "lightning_compress"
"""Under which a checkpoint, or the metadata of a state dict, holds the history of a model."""

VERSION = 3
"""Of this history: 1 had one plan, 2 had plans of format 1."""

FORMAT = 2
"""Of a plan: 1 had one list for each kind of exchange."""


def upgraded(state: Any) -> dict[str, Any]:
    """Return the state of a plan in the present format, whichever it was written in.

    Raises:
        PlanError: if it is not a plan, or is of a newer format, or incomplete.
    """
    version = state.get("format") if isinstance(state, Mapping) else None
    if not isinstance(version, int) or version < 1:
        raise PlanError("This is not a compaction plan: it has no format number.")
    if version > FORMAT:
        raise PlanError(f"The plan has format {version}; this version reads up to {FORMAT}. Update the package.")
    if version == FORMAT:
        return dict(state)
    try:
        return _from_1(state)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"The plan is damaged ({type(error).__name__}: {error}).") from error


def _from_1(state: Mapping[str, Any]) -> dict[str, Any]:
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
    return {"format": FORMAT, **kept, "exchanges": exchanges}
