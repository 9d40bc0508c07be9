"""What the log of a fit says of a plan."""

from __future__ import annotations

import engine
from lightning_compress.report.plan import brief


def test_notes_are_said_once() -> None:
    """What the certificate says is not said of the plan as well."""
    plan = engine.Plan(notes=("It takes one size.", "'fc' is masked as a whole."))
    assert brief(plan, 4, 1, other_notes=plan.notes[:1]).splitlines()[1:] == ["  'fc' is masked as a whole."]


def test_long_notes_are_cut() -> None:
    """Ten of them are shown, and how many there are."""
    lines = brief(engine.Plan(notes=tuple(map(str, range(25)))), 4, 1).splitlines()
    assert len(lines) == 12 and lines[-1] == "  … and 15 more notes"
