"""A short summary of a plan, for the log of a fit."""

from __future__ import annotations

from collections.abc import Sequence

import engine
from lightning_compress.report.content import change

_NOTES = 10  # notes of a plan that are shown


def brief(plan: engine.Plan, before: int, after: int, other_notes: Sequence[str] = ()) -> str:
    """Summarise a compaction in a few lines, because the plan of a large model has hundreds.

    Args:
        plan: the plan.
        before: number of parameters before.
        after: number of parameters after.
        other_notes: notes to omit, which are logged elsewhere.

    Example:
        >>> print(brief(engine.Plan(notes=("'fc' is masked as a whole.",)), 200, 50))
        200 -> 50 parameters (−75.0 %), 0 tensors narrowed; print(compaction.plan) lists them.
          'fc' is masked as a whole.
    """
    notes = [note for note in plan.notes if note not in other_notes]
    notes[_NOTES:] = [f"… and {len(notes) - _NOTES} more notes"] if notes[_NOTES:] else []
    first = (
        f"{before:,} -> {after:,} parameters ({change(before, after)}), {len(plan.slices)} tensors narrowed; "
        "print(compaction.plan) lists them."
    )
    return "\n  ".join([first, *notes])
