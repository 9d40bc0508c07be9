"""The page about soundness names traps that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.traps.trap import catalogue

PAGE = Path(__file__).resolve().parents[2] / "docs" / "soundness.md"


def test_every_trap_exists() -> None:
    """Behind ``Trap`` or ``Traps``, up to the end of the sentence."""
    text = " ".join(PAGE.read_text().split())
    named = [
        name for listed in re.findall(r"Traps?: (.*?)(?:\. |\.$)", text) for name in re.findall(r"\*(.+?)\*", listed)
    ]
    assert len(named) > 100
    assert not set(named) - {trap.name for trap in catalogue("TRAPS")}
