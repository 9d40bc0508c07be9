"""No mutated checkpoint loads to a wrong model, runs code, takes memory, or leaves a trace in the model it is for."""

from __future__ import annotations

import copy
import resource
from pathlib import Path

import pytest
import torch

import engine
from engine.checkpoint import KEY, content_of, seal
from engine.errors import CheckpointError
from engine.history import entry_of, history
from tests.engine import golden
from tests.engine.mutations import KINDS, mutated
from tests.engine.nets import snapshot, unchanged

MEGABYTE = 1024  # of what getrusage counts in


class Case:
    """A compacted network and its checkpoint."""

    def __init__(self, name: str) -> None:
        self.model, self.x = golden.made(name)
        self.fresh = golden.made(name)[0]
        engine.load_compacted_state(self.model, golden.FOLDER / f"{name}-2.golden")
        self.expected = self.model.eval()(self.x)
        self.content = seal({"state_dict": self.model.state_dict(), "epoch": 3, KEY: content_of(self.model)})


CASES = {name: Case(name) for name in golden.NETWORKS}


def check(seed: int, folder: Path) -> str | None:
    """Try to load a mutated checkpoint; the kind of mutation where it loads, None where it is refused."""
    names = list(CASES)
    name = names[seed % len(names)]
    case, others = CASES[name], [entry_of(CASES[n].model) for n in names if n != name]
    path, marker = folder / f"{seed}.ckpt", folder / "ran"
    kind = mutated(seed, case.content, path, marker, others)
    # One in five is for a model that is small already.
    target = copy.deepcopy(case.fresh if seed % 5 else case.model)
    before, shown, steps = snapshot(target), repr(target), history(target)
    try:
        loaded = engine.load_compacted_state(target, path)
    except CheckpointError as error:
        assert str(path) in str(error), kind
        assert unchanged(target, before) and repr(target) == shown and history(target) == steps, kind
        loaded = None
    finally:
        path.unlink()
    assert not marker.exists(), kind
    assert loaded is None or torch.equal(loaded.eval()(case.x), case.expected), kind
    return None if loaded is None else kind


def peak() -> int:
    """Megabytes that the process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // MEGABYTE


def run(seeds: range, folder: Path) -> None:
    """Try them all; hardly any loads, and no memory is taken."""
    before = peak()
    loads = [kind for kind in (check(seed, folder) for seed in seeds) if kind]
    assert peak() - before < 300
    assert len(loads) < len(seeds) // 4


def test_mutated_checkpoints(tmp_path: Path) -> None:
    """Sixty-eight of them, four of every kind."""
    run(range(4 * len(KINDS)), tmp_path)


@pytest.mark.slow
def test_a_thousand_mutated_checkpoints(tmp_path: Path) -> None:
    """As many as it takes to trust it."""
    run(range(1000, 2020), tmp_path)
