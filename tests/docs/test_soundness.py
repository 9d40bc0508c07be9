"""The page about soundness names traps, members, files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.traps.trap import catalogue

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "soundness.md"


def test_every_trap_exists() -> None:
    """Behind ``Trap`` or ``Traps``, up to the end of the sentence."""
    text = " ".join(PAGE.read_text().split())
    named = [
        name for listed in re.findall(r"Traps?: (.*?)(?:\. |\.$)", text) for name in re.findall(r"\*(.+?)\*", listed)
    ]
    assert len(named) > 100
    assert not set(named) - {trap.name for trap in catalogue("TRAPS")}


def test_every_mechanism_exists() -> None:
    """A member such as ``Constants.finite`` is named in the file of its class."""
    files = [
        path.read_text() for package in ("engine", "lightning_compress") for path in (ROOT / package).rglob("*.py")
    ]
    members = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE.read_text()))
    own = {
        (name, member)
        for name, member in members
        for text in files
        if re.search(rf"^class {name}\b", text, re.MULTILINE) and re.search(rf"\b{member}\b", text)
    }
    assert len(members) > 10
    assert not members - own


FOLDERS = ("", "engine", "lightning_compress/trainer", "tests/engine/traps")


def test_every_file_and_test_exists() -> None:
    """Files are relative to the engine, or to the root; modules of tests and tests are found by their names."""
    text = PAGE.read_text()
    tests = list((ROOT / "tests").rglob("test_*.py"))
    names = {path.name for path in tests}
    names |= {name for path in tests for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)}
    files = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(files) > 50
    assert not [file for file in files - names if not any((ROOT / folder / file).exists() for folder in FOLDERS)]
    assert not set(re.findall(r"`(test_\w+)`", text)) - names
