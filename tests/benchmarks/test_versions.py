"""The matrix of versions, without running it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import versions


def test_the_oldest_are_those_of_the_project() -> None:
    """As its lower bounds say."""
    assert versions.oldest() == ["torch==2.6.*", "pytorch-lightning==2.4.*"]


def test_the_pythons_are_those_of_the_project() -> None:
    """From the lower bound on."""
    text = (versions.ROOT / "pyproject.toml").read_text()
    assert re.search(rf'requires-python = ">={re.escape(versions.PYTHONS[0])}"', text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1 failed, 20 passed, 3 skipped, 2 xfailed in 4.20s", (20, 1, 3)),
        ("2 errors in 1.00s", (0, 2, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_the_last_line_of_pytest(line: str, expected: tuple[int, int, int]) -> None:
    """Errors count as failures."""
    assert tuple(versions.counts(line).values()) == expected


def test_an_environment_is_used_again(tmp_path: Path) -> None:
    """Where its Python is there; a version that nobody installed has none."""
    python = tmp_path / "3.11-newest" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert versions.environment("3.11-newest", tmp_path) == python
    assert versions.environment("3.99-newest", tmp_path) is None


def test_the_page() -> None:
    """Tests, and a row for each combination that was run, with its date, in order."""
    row = {"python": "3.11.1", "torch": "2.6.0", "pytorch-lightning": "2.4.0", "numpy": "2.0"}
    cells = {"3.11-oldest": {**row, "passed": 5, "failed": 0, "skipped": 1, "seconds": 9, "failures": []}}
    cells["3.11-oldest"]["date"] = "2026-01-02"
    page = versions.page({"tests": ["tests/engine"], "cells": cells}, ["3.10", "3.11-oldest"])
    assert 'The tests:\n`pytest -m "not slow" tests/engine`' in page
    assert page.endswith("| 3.11.1 | 2.6.0 | 2.4.0 | 2.0 | 5 | 0 | 1 | 9 | 2026-01-02 |\n")
