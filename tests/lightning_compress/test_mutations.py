"""No mutated checkpoint gets into a LightningModule, whichever way it is loaded."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer

from engine.compaction.history import entry_of
from engine.errors import CheckpointError
from engine.files.checkpoint import KEY
from lightning_compress import ChannelPruning, ModelCompaction, load_compacted
from tests.engine.mutations import KINDS, mutated
from tests.engine.test_mutations import CASES, LIMITS, limited, out_of_memory, peak, reset_peak
from tests.lightning_compress.models import Reference, data, fit, seeded, trainer
from tests.lightning_compress.trainer.test_restore import Mixed, outputs

# Lightning reads a file before we see it; its older versions run what is in there.
TRUSTING = "weights_only" not in inspect.signature(Trainer.test).parameters

pytestmark = pytest.mark.skipif(not LIMITS.exists(), reason="only Linux tells how much memory was taken")


class Target:
    """A checkpoint, what it stands for, and the ways to load it."""

    def __init__(self, folder: Path) -> None:
        compaction, module = ModelCompaction(on_failure="raise"), seeded(Mixed)
        fit(module, folder, Reference(), ChannelPruning(amount=0.5), compaction)
        self.content = torch.load(compaction.checkpoint_path, weights_only=True)
        self.expected, self.small, self.folder = outputs(module), module, folder
        self.others = [entry_of(case.model) for case in CASES.values()]
        self.ways: list[Callable[[Path], Mixed]] = [
            lambda path: load_compacted(path, Mixed),
            Mixed.load_from_checkpoint,
            self.tested,
        ]

    def tested(self, path: Path) -> Mixed:
        """The module after `trainer.test(ckpt_path=...)`; where that fails it is as it was."""
        module = Mixed() if path.stem[-1] in "02468" else copy.deepcopy(self.small)
        before, shown = copy.deepcopy(module.state_dict()), repr(module)
        try:
            trainer(self.folder).test(module, data(8), ckpt_path=str(path), verbose=False)
        except BaseException:
            assert repr(module) == shown and all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
            raise
        return module

    def check(self, seed: int) -> bool:
        """Whether a mutated checkpoint loads."""
        path, marker = self.folder / f"{seed}.ckpt", self.folder / "ran"
        kind = mutated(seed, self.content, path, marker, self.others)
        way = seed // len(KINDS) % len(self.ways)
        # Names that differ are torch's to refuse; a Trainer reads the file before we see it.
        refusal: Any = (CheckpointError, (CheckpointError, RuntimeError), Exception)[way]
        try:
            with limited():
                found = outputs(self.ways[way](path))
        except refusal as error:
            assert not isinstance(error, AssertionError) and not out_of_memory(error), kind
            return False
        finally:
            path.unlink()
            if way and TRUSTING:
                shutil.rmtree(marker, ignore_errors=True)
            assert not marker.exists(), kind
        assert torch.equal(found, self.expected), kind
        return True


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """One compacted fit."""
    return Target(tmp_path_factory.mktemp("mutations"))


def test_mutated_checkpoints(target: Target) -> None:
    """Three of every kind, one for each way of loading."""
    assert KEY in target.content
    assert sum(target.check(seed) for seed in range(3 * len(KINDS))) < len(KINDS)


@pytest.mark.slow
def test_a_thousand_mutated_checkpoints(target: Target) -> None:
    """As many as it takes to trust it, without memory being taken."""
    reset_peak()
    before = peak()
    assert sum(target.check(seed) for seed in range(1000, 2020)) < 250
    assert peak() - before < 100
