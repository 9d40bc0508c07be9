"""How fast the analysis is, how much memory it takes, how it grows, and how fast the networks are that it makes.

    python benchmarks/speed.py [--quick] [--fresh] [--only analysis memory …] [--out docs/benchmarks.md]

This project, its floor and its peer are measured in turns, in one process per network, on one thread, in CPU seconds
(other work on the machine disturbs these less than the time on the wall). Finished measurements are kept in
``build/speed.jsonl``, by the state of the code: a run that was stopped goes on where it was. The page is written from
these rows alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import MEASURES, Row
from benchmarks.page import page

ROOT = Path(__file__).resolve().parents[1]
_KEPT = ROOT / "build" / "speed.jsonl"
_ROUNDS = {False: 5, True: 2}


def job(kind: str, name: str, rounds: int) -> Row:
    """Run one measurement in a process of its own, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", __file__, "--job", kind, name, str(rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Measuring {kind} of {name} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def code_state() -> str:
    """Return a hash of what is measured and of what measures; other results are not taken over."""
    files = [f for folder in ("engine", "lightning_compress") for f in sorted((ROOT / folder).rglob("*.py"))]
    files += [ROOT / "benchmarks" / f"{name}.py" for name in ("language", "measure", "narrow", "overhead", "subjects")]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


def machine() -> str:
    """Say where this runs, in general terms."""
    peers = ", ".join(f"{name} {version(name)}" for name in ("torch", "torch-pruning", "transformers"))
    cores = f"{os.cpu_count()} cores ({_processor()}), of which one is used"
    return f"{cores}; Python {platform.python_version()}, {peers}"


def _processor() -> str:
    """Name of the processor, where the system tells it."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def collect(quick: bool, fresh: bool, only: list[str]) -> dict[str, dict[str, Row]]:
    """Return all rows by kind and name; measure what is missing."""
    _KEPT.parent.mkdir(exist_ok=True)
    lines = _KEPT.read_text().splitlines() if _KEPT.exists() and not fresh else []
    rows_by_job = {tuple(row["job"]): row["found"] for row in map(json.loads, lines)}
    if fresh:
        _KEPT.unlink(missing_ok=True)
    rows: dict[str, dict[str, Row]] = {}
    state = code_state()
    for kind, (_, names) in MEASURES.items():
        for name in names if not only or kind in only else []:
            key = (kind, name, _ROUNDS[quick], state)
            if key not in rows_by_job:
                start = time.perf_counter()
                rows_by_job[key] = job(*key[:3])
                print(f"{kind}: {name}, {time.perf_counter() - start:.0f} s", flush=True)
                with _KEPT.open("a") as file:
                    file.write(json.dumps({"job": key, "found": rows_by_job[key]}) + "\n")
            rows.setdefault(kind, {})[name] = rows_by_job[key]
    return rows


def main() -> int:
    """Measure what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds in place of five")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--only", nargs="+", default=[], choices=list(MEASURES), help="kinds of measurements")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return _run(*args.job)
    rows = collect(args.quick, args.fresh, args.only)
    args.out.write_text(page(rows, machine(), _ROUNDS[args.quick]))
    print(f"Written: {args.out}")
    return 0


def _run(kind: str, name: str, rounds: str) -> int:
    import torch

    torch.set_num_threads(1)
    row: dict[str, Any] = MEASURES[kind][0](name, int(rounds))
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
