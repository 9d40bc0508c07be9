"""Two processes that share a decoder, on a few sequences."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sharded


def test_two_processes_shrink_a_decoder(tmp_path: Path) -> None:
    """Run as its docstring says; the network is verified, and the checkpoint is there."""
    root = Path(sharded.__file__).parents[1]
    options = ["--log-dir", str(tmp_path), "--limit", "96", "--epochs", "2"]
    done = subprocess.run(
        [sys.executable, sharded.__file__, *options],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    assert results["processes"].strip() == "2" and results["verified"].strip() == "True"
    before, after = (int(n.replace(",", "")) for n in results["parameters"].split("->"))
    assert after < 0.5 * before and Path(results["checkpoint"].strip()).is_file()
