"""The smallest form of ``kills.py``, which kills a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning_compress.kills import killed


@pytest.mark.slow
def test_killed_while_writing(tmp_path: Path) -> None:
    """All files load after each kill, nothing is left by killed writers, and the weights are those of a run alone."""
    lines: list[str] = []
    killed(tmp_path, ("epochs",), 4, 0, lines.append)
    assert lines[-1].startswith("4 kills")
