"""Two processes, on a few digits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ddp


def test_two_processes_end_with_the_same_small_network(tmp_path: Path) -> None:
    """Run as its docstring says; both ranks hold the same weights, and the checkpoint is there."""
    root = Path(ddp.__file__).parents[1]
    options = ["--log-dir", str(tmp_path), "--limit", "96", "--epochs", "2"]
    done = subprocess.run(
        [sys.executable, ddp.__file__, *options],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    assert found["processes"].strip() == "2" and found["same weights on all ranks"].strip() == "True"
    before, after = (int(n.replace(",", "")) for n in found["parameters"].split("->"))
    assert after < 0.3 * before and Path(found["checkpoint"].strip()).is_file()
