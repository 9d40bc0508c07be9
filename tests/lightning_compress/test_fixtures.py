"""What users of other tools reported about training, as tests; those about networks are in ``tests/engine``.

Ranks of DDP that choose different masks (nni#5205): ``test_ddp.py::test_both_ranks_hold_the_same_after_each_step``.
An optimizer whose steps go on as those under masks: ``test_shrinking.py``, with every optimizer of torch.
A compacted checkpoint in another process: ``test_checkpoint.py::test_loads_in_a_fresh_process``.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from lightning_compress import ChannelPruning, ModelCompaction, load_compacted
from tests.engine import test_fixtures
from tests.lightning_compress.models import Wrapped, difference, fit, seeded


def test_reload_of_a_pruned_checkpoint(tmp_path: Path) -> None:
    """A file with pruned shapes loads into the class that the user wrote, bit for bit, and trains on."""
    compaction = ModelCompaction()
    module = seeded(Wrapped)
    fit(module, tmp_path, ChannelPruning("l1", amount=0.5), compaction)
    loaded = load_compacted(compaction.checkpoint_path, Wrapped)
    assert loaded.net.stem.out_channels == 4 and difference(loaded, module) == 0.0
    fit(loaded.train(), tmp_path / "again")  # a comparison has put it into eval mode
    assert loaded.net.stem.out_channels == 4 and difference(loaded, module) > 0


def test_the_optimizer_holds_what_is_left(tmp_path: Path) -> None:
    """After pruning while training it steps the very parameters of the model: nni#4521, fasterai#92."""
    module = seeded(Wrapped)
    before = [id(p) for p in module.parameters()]
    pruning = ChannelPruning("l1", amount=0.5, start=0, end=1)
    trainer = fit(module, tmp_path, pruning, ModelCompaction(when=[1]), max_epochs=3)
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in module.parameters()] == before
    assert module.net.stem.out_channels == 4 and len(held) > 7
    states = trainer.optimizers[0].state
    assert all(states[p]["momentum_buffer"].shape == p.shape for p in held) and len(states) == len(held)


@pytest.mark.parametrize("amount", [0.3, 0.5, 0.7])
def test_pruned_but_not_faster(tmp_path: Path, amount: float) -> None:
    """Odd widths run slower than the ones before: widths are rounded up to a multiple: Torch-Pruning#149."""
    module = seeded(Wrapped)
    fit(module, tmp_path, ChannelPruning("l1", amount=amount, round_to=4), ModelCompaction())
    widths = [module.net.stem.out_channels, module.net.wide.out_channels]
    assert all(width % 4 == 0 for width in widths) and widths < [8, 16]
    assert all(width >= (1 - amount) * full for width, full in zip(widths, [8, 16], strict=True))


def test_every_reported_trap_has_a_test() -> None:
    """The threads that are known, by project and number, each stand in the docstring of a test."""
    known = """
        nni#2130 nni#3010 nni#5095 nni#5449 nni#5187 nni#3453 nni#4540 nni#4521 nni#5205 nni#3013
        NNCF#986 fasterai#40 fasterai#92
        Torch-Pruning#14 Torch-Pruning#44 Torch-Pruning#99 Torch-Pruning#125 Torch-Pruning#126 Torch-Pruning#149
        Torch-Pruning#179 Torch-Pruning#287 Torch-Pruning#404
    """.split()
    files = [Path(__file__), Path(inspect.getfile(test_fixtures))]
    trees = [ast.parse(file.read_text()) for file in files]
    told = [ast.get_docstring(tree) or "" for tree in trees]
    told += [ast.get_docstring(n) or "" for tree in trees for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert [thread for thread in known if not any(thread in text for text in told)] == []
    ddp = ast.parse(Path(__file__).with_name("test_ddp.py").read_text())
    assert "test_both_ranks_hold_the_same_after_each_step" in {
        n.name for n in ddp.body if isinstance(n, ast.FunctionDef)
    }
