"""Tests of what comes back from processes that were forked or spawned; test_ddp.py has whole fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_compress import ChannelPruning, ModelCompaction
from lightning_compress.trainer.launchers import KEY, bring_results_back
from lightning_compress.trainer.packages import classes
from tests.lightning_compress.models import Wrapped, fit, seeded

LAUNCHER = classes("tree.strategies.launchers.multiprocessing", "_MultiProcessingLauncher")[0]


def test_extending_twice_extends_once() -> None:
    """Each callback asks for it; the launcher is wrapped a single time, in either package."""
    bring_results_back()
    once = LAUNCHER.get_extra_results
    ModelCompaction()
    assert LAUNCHER.get_extra_results is once
    assert once.__wrapped__.__qualname__ == "_MultiProcessingLauncher.get_extra_results"
    assert not hasattr(once.__wrapped__, "__wrapped__")


def test_the_module_that_stayed_behind_takes_the_small_weights(tmp_path: Path) -> None:
    """What one process sends the other one receives: shapes, weights, plan, certificate, path, also of two models."""
    worker, main = ModelCompaction(on_failure="raise"), ModelCompaction()
    module, behind = seeded(Wrapped), Wrapped()
    trainer = fit(module, tmp_path, worker, ChannelPruning(amount=0.5))
    strategy = SimpleNamespace(checkpoint_io=trainer.strategy.checkpoint_io, local_rank=0)
    launcher = SimpleNamespace(_strategy=strategy)
    for name in ("get_extra_results", "update_main_process_results"):
        setattr(launcher, name, getattr(LAUNCHER, name).__get__(launcher))
    sent = LAUNCHER._collect_rank_zero_results(launcher, trainer, None)
    here: Any = SimpleNamespace(
        callbacks=[main], lightning_module=behind, checkpoint_callback=None, callback_metrics={}, state=None
    )
    LAUNCHER._recover_results_in_main_process(launcher, sent, here)
    assert behind.net.wide.weight.shape[0] == 8
    assert all(torch.equal(behind.state_dict()[name], value) for name, value in module.state_dict().items())
    assert main.checkpoint_path == worker.checkpoint_path and main.certificate.verified
    assert {n: c.shape for n, c in main.plan.slices.items()} == {n: c.shape for n, c in worker.plan.slices.items()}
    assert KEY not in sent.extra
