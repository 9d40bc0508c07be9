"""A user's own file of the name `engine`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["engine.py", "engine/__init__.py"])
@pytest.mark.parametrize("first", ["", "import engine; "])
def test_one_line_says_what_happened(tmp_path: Path, name: str, first: str) -> None:
    """The error names the file and what to do; the file is not run for it."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("print('the own engine ran')\n")
    (tmp_path / "train.py").write_text(f"{first}import lightning_compress\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    last = out.stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: lightning_compress needs the package `engine`") and "rename your file" in last
    assert str(tmp_path / name) in last and ("ran" in out.stdout) is bool(first)


def test_the_package_itself() -> None:
    """Where nothing is in the way, nothing is said."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "from lightning_compress.namesake import check_engine; check_engine()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
