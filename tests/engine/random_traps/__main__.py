"""Examine random networks: ``python -m tests.engine.random_traps SEED COUNT [--processes N] [--verbose]``."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch

from tests.engine.random_traps.oracle import OUTCOMES, Result, examine

__all__ = ["main"]


def main() -> int:
    """Print failures as they come, and counts at the end; return 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.random_traps", description=__doc__)
    parser.add_argument("seed", type=int, help="of the first network")
    parser.add_argument("count", type=int, help="number of networks; each has a seed of its own")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print what is exact or refused as well")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    start, shrunk = time.monotonic(), 0
    for result in _results(range(options.seed, options.seed + options.count), options.processes):
        counts[result.outcome] += 1
        shrunk += result.shrunk
        if options.verbose or result.outcome in ("wrong", "internal"):
            _show(result)
        if counts.total() % 500 == 0:
            print(_summary(counts, shrunk, time.monotonic() - start), flush=True)
    print(_summary(counts, shrunk, time.monotonic() - start))
    return 1 if counts["wrong"] or counts["internal"] else 0


def _results(seeds: range, processes: int) -> Iterator[Result]:
    if processes == 1:
        torch.set_num_threads(1)  # as below: threads that wait for one another take several times as long
        yield from map(examine, seeds)
        return
    start = functools.partial(torch.set_num_threads, 1)
    with multiprocessing.get_context("spawn").Pool(processes, start, maxtasksperchild=500) as pool:
        yield from pool.imap_unordered(examine, seeds, chunksize=5)


def _show(result: Result) -> None:
    print(f"{result.outcome}: python -m tests.engine.random_traps {result.seed} 1\n  {result.text}")
    if result.detail:
        print(f"  {result.detail}")
    sys.stdout.flush()


def _summary(counts: Counter[str], shrunk: int, seconds: float) -> str:
    total = counts.total()
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    share, rate = shrunk / total, total / seconds
    return f"{total} networks: {parts}; {shrunk} lost parameters ({share:.0%}); {rate:.1f} per second"


if __name__ == "__main__":
    sys.exit(main())
