"""Hostile files, each read in a process of its own: no memory, no time, no code, and nothing wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(first: int, count: int) -> subprocess.CompletedProcess[str]:
    """Read the files of some seeds."""
    command = [sys.executable, "-m", "tests.engine.files.hostile", str(first), str(count)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the most memory of a process is asked of Linux")
@pytest.mark.parametrize(("first", "count"), [(0, 60), pytest.param(10_000, 5000, marks=pytest.mark.slow)])
def test_hostile_files(first: int, count: int) -> None:
    """At most 64 MB and four times the file, two seconds; nothing executed, nothing wrong loaded, nothing changed."""
    out = run(first, count)
    assert out.returncode == 0, out.stdout + out.stderr
    assert f"{count} files" in out.stdout
