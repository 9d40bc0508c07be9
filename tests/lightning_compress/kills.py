"""Kill fits at random moments, and resume them: ``python -m tests.lightning_compress.kills COUNT [SEED]``.

The fits prune, compact in the middle, and write checkpoints all the time: Lightning's, compacted ones and safetensors.
What has to hold: after each kill every file loads; once the resumed run has written again, nothing that a killed one
left is there; and runs that were killed and resumed end with the bits of the run that was left alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

import engine
from engine.files.checkpoint import read_any
from lightning_compress.checkpoints.compacted import dump, write
from tests.lightning_compress.models import seeded, trainer
from tests.lightning_compress.test_resume import EPOCHS, Save, Seeded, callbacks

KINDS = ("epochs", "steps", "chance")
IN_A_ROW = 5  # kills of one run
TEMPORARY = ".lightning-compress-*"


class Write(Callback):
    """Writes what we write, after each step, over what was there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """A checkpoint with plans and the optimizer, and plain weights."""
        write(dump(trainer, weights_only=False), self.folder / "small.ckpt")
        if find_spec("safetensors"):
            engine.save_safetensors(pl_module, self.folder / "small.safetensors")


def run(folder: Path, kind: str) -> None:
    """Fit from the last checkpoint, if there is one, and write the final weights as `ModelCompaction` does."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    module, last = seeded(Seeded), folder / "last.ckpt"
    fitted = trainer(folder, *callbacks(kind), Save(last), Write(folder), max_epochs=EPOCHS)
    fitted.fit(module, ckpt_path=str(last) if last.exists() else None)
    (folder / "ended").touch()


def start(folder: Path, kind: str) -> Any:
    """`run` in another process, forked from one that has imported all and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lightning_compress.kills"])
    process = context.Process(target=run, args=(folder, kind))
    process.start()
    return process


def run_through(folder: Path, kind: str) -> dict[str, Tensor]:
    """Let a run come to its end; the weights that it wrote."""
    process = start(folder, kind)
    process.join()
    assert process.exitcode == 0 and (folder / "ended").exists()
    weights: dict[str, Tensor] = read_any(newest(folder))["state_dict"]
    return weights


def newest(folder: Path) -> Path:
    """The compacted checkpoint that was written last: each run writes one of its own."""
    return max(folder.glob("compacted*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def check_files(folder: Path) -> int:
    """Read every file; how many there are."""
    files = [*folder.glob("[!.]*.ckpt"), *folder.glob("[!.]*.safetensors")]
    for path in files:
        read_any(path)
    return len(files)


def chain(folder: Path, kind: str, kills: int, seconds: float, chance: random.Random) -> tuple[dict[str, Tensor], int]:
    """Kill a run so many times, and let it come to its end; its weights, and how many kills hit a writer."""
    folder.mkdir()
    hit = 0
    while kills:
        begin, process = time.monotonic(), start(folder, kind)
        process.join(chance.uniform(0.02, seconds))
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            kills -= 1
            hit += bool(list(folder.glob(TEMPORARY)))
            check_files(folder)
        else:  # it came to its end before its time: once more from the start
            assert process.exitcode == 0
            seconds = min(seconds, time.monotonic() - begin)
            (folder / "last.ckpt").unlink()
            (folder / "ended").unlink()
    weights = run_through(folder, kind)
    left = [path.name for path in folder.glob(".*")]
    assert not left, left
    check_files(folder)
    return weights, hit


def killed(folder: Path, kinds: tuple[str, ...], count: int, seed: int, report: Callable[[str], None] = print) -> int:
    """Kill so many fits of each kind in turn; how many kills hit a writer.

    Raises:
        AssertionError, EngineError: where something does not hold.
    """
    chance, done, hits = random.Random(seed), 0, 0
    alone: dict[str, tuple[dict[str, Tensor], float]] = {}
    while done < count:
        kind = kinds[done // IN_A_ROW % len(kinds)]
        if kind not in alone:
            (folder / kind).mkdir()
            begin = time.monotonic()
            alone[kind] = run_through(folder / kind, kind), time.monotonic() - begin
        wanted, seconds = alone[kind]
        kills = min(IN_A_ROW, count - done)
        weights, hit = chain(folder / f"{kind}-{done}", kind, kills, seconds, chance)
        assert weights.keys() == wanted.keys() and all(torch.equal(weights[name], wanted[name]) for name in wanted)
        done, hits = done + kills, hits + hit
        report(f"{done} kills, {hits} of them while a file was written: all files load, equal to the bit")
    return hits


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        killed(Path(scratch), KINDS, int(sys.argv[1]), int(*sys.argv[2:]) if sys.argv[2:] else 0)
