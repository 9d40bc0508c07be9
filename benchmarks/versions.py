"""The tests on each supported Python, with the oldest and the newest torch and Lightning, each in an environment anew.

    python benchmarks/versions.py [--environments FOLDER] [--only 3.11-oldest ...] [test ...]

Needs an interpreter of each version: ``python3.11`` and so on, or one that pyenv installed. Environments are made in
``build/versions`` and used again; an environment takes six gigabytes. By default all tests that are not slow run. What
came of it is kept in ``build/versions.json``, and the page is ``docs/versions.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "build" / "versions.json"
PYTHONS = ("3.11", "3.12", "3.13")
LIMITED = ("torch", "pytorch-lightning")

HEAD = """# Versions

`make versions` runs the tests on each supported Python, with the oldest torch and Lightning that `pyproject.toml` takes
and with the newest that can be installed there, each combination in an environment of its own. The tests:
{tests}.

| Python | torch | Lightning | numpy | passed | failed | skipped | seconds | run on |
|---|---|---|---|---:|---:|---:|---:|---|
"""


def oldest() -> list[str]:
    """Return requirements of the oldest versions that the project takes.

    Example:
        >>> oldest()
        ['torch==2.6.*', 'pytorch-lightning==2.4.*']
    """
    text = (ROOT / "pyproject.toml").read_text()
    bounds = {name: re.search(rf'"{name}>=([\d.]+)"', text) for name in LIMITED}
    return [f"{name}=={bound[1]}.*" for name, bound in bounds.items() if bound]


def interpreter(version: str) -> str | None:
    """Return the command of a Python of a version, or None where there is none."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for command in (shutil.which(f"python{version}"), *map(str, reversed(installed))):
        if command and subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode == 0:
            return command
    return None


def environment(cell: str, folder: Path) -> Path | None:
    """Return the Python of a combination's environment, which is made where it is missing; None if it cannot be."""
    python = folder / cell / "bin" / "python"
    version, _, age = cell.partition("-")
    if python.is_file():
        return python
    command = interpreter(version)
    if command is None:
        return None
    subprocess.run([command, "-m", "venv", str(folder / cell)], check=True)
    limits = oldest() if age == "oldest" else []
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--editable", f"{ROOT}[dev]", *limits], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions of what is installed."""
    names = ("torch", "pytorch-lightning", "numpy")
    code = "import json, platform, sys; from importlib.metadata import version; "
    code += "print(json.dumps([platform.python_version(), *map(version, sys.argv[1:])]))"
    out = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(zip(("python", *names), json.loads(out.stdout), strict=True))


def tested(python: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Run tests in an environment and return what came of them."""
    start = time.monotonic()
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    last = out.stdout.strip().splitlines()[-1] if out.stdout.strip() else ""
    failures = [line for line in out.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([*failures, last or out.stderr[-2000:]]), flush=True)
    return {**counts(last), "seconds": round(time.monotonic() - start), "failures": failures}


def counts(line: str) -> dict[str, int]:
    """Return the numbers in the last line of pytest.

    Example:
        >>> counts("1 failed, 20 passed, 3 skipped, 2 xfailed in 4.20s")
        {'passed': 20, 'failed': 1, 'skipped': 3}
    """
    numbers = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)\b", line)}
    failed = sum(numbers.get(word, 0) for word in ("failed", "error", "errors"))
    return {"passed": numbers.get("passed", 0), "failed": failed, "skipped": numbers.get("skipped", 0)}


def page(results: dict[str, Any], cells: Sequence[str]) -> str:
    """Return the page."""
    rows = [results["cells"][cell] for cell in cells if cell in results["cells"]]
    tests = f'`pytest -m "not slow" {" ".join(results["tests"])}`'.replace(" `", "`")
    return HEAD.format(tests=tests) + "".join(f"{line(row)}\n" for row in rows)


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    keys = ("python", "torch", "pytorch-lightning", "numpy", "passed", "failed", "skipped", "seconds", "date")
    return f"| {' | '.join(str(row[key]) for key in keys)} |"


def run(cells: Sequence[str], folder: Path, tests: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what came of each combination."""
    for cell in cells:
        python = environment(cell, folder)
        if python is None:
            print(f"{cell}: there is no such Python here", flush=True)
            continue
        print(cell, flush=True)
        yield cell, {**versions(python), **tested(python, tests)}


def main() -> int:
    """Run what is asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or folders; by default all")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--only", nargs="*", help="combinations, as 3.11-oldest")
    options = parser.parse_args()
    every = [f"{version}-{age}" for version in PYTHONS for age in ("oldest", "newest")]
    date = datetime.now(UTC).date().isoformat()
    results: dict[str, Any] = {"tests": options.tests, "cells": {}}
    if RESULTS.is_file() and (before := json.loads(RESULTS.read_text()))["tests"] == options.tests:
        results["cells"] = before["cells"]
    RESULTS.parent.mkdir(exist_ok=True)
    for cell, row in run(options.only or every, options.environments, options.tests):
        results["cells"][cell] = {**row, "date": date}
        RESULTS.write_text(json.dumps(results, indent=1))
        PAGE.write_text(page(results, every))
    return int(any(row["failed"] or not row["passed"] for row in results["cells"].values()))


if __name__ == "__main__":
    sys.exit(main())
