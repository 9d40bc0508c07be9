"""No mutated checkpoint loads to a wrong model, runs code, takes memory, or leaves a trace in the model it is for."""

from __future__ import annotations

import contextlib
import copy
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine
from engine.compaction.history import entry_of, history
from engine.errors import CheckpointError
from engine.files.checkpoint import KEY, content_of, seal
from tests.engine import golden
from tests.engine.mutations import KINDS, mutated, mutated_tensors
from tests.engine.nets import snapshot, unchanged

LIMITS = Path("/proc/self/clear_refs")
pytestmark = pytest.mark.skipif(not LIMITS.exists(), reason="only Linux tells how much memory was taken")


class Case:
    """A compacted network and its checkpoint."""

    def __init__(self, name: str) -> None:
        self.model, self.x = golden.made(name)
        self.fresh = golden.made(name)[0]
        engine.load_compacted_state(self.model, golden.FOLDER / f"{name}-2.golden")
        self.model.eval()
        self.content = seal({"state_dict": self.model.state_dict(), "epoch": 3, KEY: content_of(self.model)})

    @property
    def expected(self) -> Tensor:
        """What the model puts out, computed on as many threads as what it is held against: bits are compared."""
        return self.model(self.x)


CASES = {name: Case(name) for name in golden.NETWORKS}


def check(seed: int, folder: Path) -> str | None:
    """Try to load a mutated checkpoint; the kind of mutation where it loads, None where it is refused."""
    names = list(CASES)
    name = names[seed % len(names)]
    case, others = CASES[name], [entry_of(CASES[n].model) for n in names if n != name]
    path, marker = folder / f"{seed}.ckpt", folder / "ran"
    kind = mutated(seed, case.content, path, marker, others)
    loads = is_refused_or_right(seed, case, path, kind)
    assert not marker.exists(), kind
    return kind if loads else None


def check_tensors(seed: int, folder: Path) -> str | None:
    """The same for files of safetensors."""
    case, path = list(CASES.values())[seed % len(CASES)], folder / f"{seed}.safetensors"
    engine.save_safetensors(case.model, path)
    kind = mutated_tensors(seed, path.read_bytes(), path)
    return kind if is_refused_or_right(seed, case, path, kind) else None


def is_refused_or_right(seed: int, case: Case, path: Path, kind: str) -> bool:
    """Whether a file loads, into a model that puts out the very bits; else the target is as it was."""
    # One in five is for a model that is small already.
    target = copy.deepcopy(case.fresh if seed % 5 else case.model)
    before, shown, steps = snapshot(target), repr(target), history(target)
    try:
        with limited():
            loaded = engine.load_compacted_state(target, path)
    except CheckpointError as error:
        assert str(path) in str(error) and not out_of_memory(error), kind
        assert unchanged(target, before) and repr(target) == shown and history(target) == steps, kind
        loaded = None
    finally:
        path.unlink()
    assert loaded is None or torch.equal(loaded.eval()(case.x), case.expected), kind
    return loaded is not None


@contextlib.contextmanager
def limited(gigabytes: int = 1) -> Iterator[None]:
    """Let the process take so much address space more, whether it writes to it or not."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + gigabytes * 2**30, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the limit is what an error is about, and not a check."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate" in str(error) or "Cannot allocate" in str(error):
            return True
        error = error.__cause__
    return False


def reset_peak() -> None:
    """Forget what the process held before, and what it would give back in between."""
    gc.collect()
    LIMITS.write_text("5")


def peak() -> int:
    """Megabytes that the process has held at most since then."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) // 1024


def run(seeds: range, folder: Path, check: Callable[[int, Path], str | None] = check) -> None:
    """Try them all; hardly any loads, and no memory is taken."""
    reset_peak()
    before = peak()
    loads = [kind for kind in (check(seed, folder) for seed in seeds) if kind]
    assert peak() - before < 100
    assert len(loads) < len(seeds) // 4


def test_the_limits_are_seen() -> None:
    """What takes memory, and what only claims it, would be noticed."""
    reset_peak()
    before = peak()
    torch.ones(150 * 2**20, dtype=torch.uint8)
    assert peak() - before > 100
    with limited(), pytest.raises(RuntimeError) as found:
        torch.empty(2 * 2**30, dtype=torch.uint8)
    assert out_of_memory(found.value)


def test_mutated_checkpoints(tmp_path: Path) -> None:
    """Sixty-eight of them, four of every kind."""
    run(range(4 * len(KINDS)), tmp_path)


@pytest.mark.slow
def test_a_thousand_mutated_checkpoints(tmp_path: Path) -> None:
    """As many as it takes to trust it."""
    run(range(1000, 2020), tmp_path)


def test_mutated_safetensors(tmp_path: Path) -> None:
    """Forty files of the format without a pickle."""
    pytest.importorskip("safetensors")
    run(range(40), tmp_path, check_tensors)


@pytest.mark.slow
def test_a_thousand_mutated_safetensors(tmp_path: Path) -> None:
    """As many again."""
    pytest.importorskip("safetensors")
    run(range(1000, 2000), tmp_path, check_tensors)
