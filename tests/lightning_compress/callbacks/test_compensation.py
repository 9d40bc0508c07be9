"""Compensation while training."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks as lightning_callbacks
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_compress import ChannelPruning, Compensation, MaskConflictRepair, ModelCompaction
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Base, Root, Wrapped, data, fit, seeded

ROOT = Path(__file__).parents[3]


class Shuffled(Wrapped):
    """Draws an order, and dropout, from the global random state; notes what it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net.fc = nn.Sequential(nn.Dropout(0.2), self.net.fc)
        self.batches: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Note the labels and the random state."""
        self.batches.append(torch.cat([batch[1].float(), torch.get_rng_state().float()]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        """Shuffled."""
        return DataLoader(data(48).dataset, batch_size=8, shuffle=True)


class Around(Callback):
    """Keeps model and optimizer state in front of each pruning, and right behind it."""

    def __init__(self, pruning: ChannelPruning) -> None:
        self.pruning, self.last = pruning, {}
        self.events: list[tuple[Any, Any]] = []
        self.counts: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In front; this callback stands first."""
        self._keep(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Behind."""
        if self.pruning.masks is not self.last["masks"]:
            before = self.last
            self._keep(trainer, pl_module)
            self.events.append((before, self.last))

    def _keep(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
        self.last = {"masks": self.pruning.masks, "model": copy.deepcopy(pl_module).eval(), "optimizer": state}


def around(folder: Path, module: Base, *callbacks: Any, **options: Any) -> list[tuple[Any, Any]]:
    """States in front of and behind each pruning of a fit."""
    pruning = ChannelPruning(amount=0.5, schedule="linear", end=2)
    watch = Around(pruning)
    fit(module, folder, watch, *callbacks, pruning, **options)
    return watch.events


def moved(event: tuple[Any, Any]) -> float:
    """How far a pruning moved the outputs on fresh images."""
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        before, after = (state["model"].logits(x.to(next(state["model"].parameters()))) for state in event)
    return float((after - before).square().mean())


@pytest.mark.parametrize("cls", [Wrapped, Root])
def test_the_outputs_stay_close_at_each_pruning(tmp_path: Path, cls: type[Base]) -> None:
    """Closer than masks alone leave them, at the first pruning and the second; optimizer states stay, masks hold."""
    plain = around(tmp_path, seeded(cls))
    compensation = Compensation(samples=24)
    events = around(tmp_path, seeded(cls), compensation, MaskConflictRepair())
    assert len(events) == len(plain) == 2
    assert moved(events[0]) < 0.5 * moved(plain[0])
    for before, after in events:
        states = [(s[k], after["optimizer"][i][k]) for i, s in before["optimizer"].items() for k in s]
        assert all(one is None or torch.equal(one, other) for one, other in states)
        for name, own in after["masks"].items():
            for key, mask in own.items():
                model = after["model"].net if cls is Wrapped else after["model"]
                assert not model.get_parameter(f"{name}.{key}")[~mask].any()
    rows = compensation.report.values()
    assert rows and all(row.after <= row.before for row in rows) and any(row.after < row.before for row in rows)


def _norm_and_inputs(folder: Path, *callbacks: Any) -> tuple[Tensor, Tensor]:
    """The mean that a norm has after a pruning, and that of its inputs."""
    net = around(folder, seeded(Wrapped), *callbacks, Compensation(samples=24))[0][1]["model"].net
    with torch.no_grad():
        return net.norm.running_mean, net.stem(data().dataset.tensors[0]).mean((0, 2, 3))


def test_train_mode_goes_on_from_what_eval_mode_computes(tmp_path: Path) -> None:
    """The norms have the statistics of their inputs."""
    torch.testing.assert_close(*_norm_and_inputs(tmp_path), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning before 2.6")
def test_beside_an_average_of_weights_norms_keep_their_statistics(tmp_path: Path) -> None:
    """The average holds weights that belong to them."""
    mean, inputs = _norm_and_inputs(tmp_path, lightning_callbacks.EMAWeightAveraging(decay=0.9))
    assert not torch.allclose(mean, inputs, rtol=1e-2)


def test_norms_alone(tmp_path: Path) -> None:
    """Of the statistics only, which become those of the masked model; the parameters are as without it."""
    plain = around(tmp_path, seeded(Wrapped))[0][1]["model"]
    norms = around(tmp_path, seeded(Wrapped), Compensation(samples=24, method="norms"))[0][1]["model"]
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), norms.parameters(), strict=True))
    assert not torch.equal(plain.net.wide_norm.running_mean, norms.net.wide_norm.running_mean)
    images = data().dataset.tensors[0]
    with torch.no_grad():
        seen = norms.net.stem(images)
    torch.testing.assert_close(norms.net.norm.running_mean, seen.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_the_order_of_training_and_the_random_state_stay(tmp_path: Path) -> None:
    """Each step sees the batch and the random state that it sees without compensation."""
    runs = []
    for callbacks in ([], [Compensation(samples=20)], [Compensation(samples=20, method="norms")]):
        module = seeded(Shuffled)
        around(tmp_path, module, *callbacks)
        runs.append(module.batches)
    for run in runs[1:]:
        assert len(run) == len(runs[0]) and all(map(torch.equal, run, runs[0]))


def test_what_was_fine_tuned_stays(tmp_path: Path) -> None:
    """The end of a fit whose last pruning lies behind it changes nothing; masks that appear after the last optimizer
    step are compensated.
    """

    class Count(Compensation):
        events: tuple[int, ...] = ()

        def during_masking(self, trainer: Trainer, *rest: Any) -> None:
            self.events = (*self.events, trainer.global_step)
            super().during_masking(trainer, *rest)

    class Last(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
            self.weights = copy.deepcopy(pl_module.state_dict())

    for end, steps in ((5, (4, 5)), (9, (8, 9))):
        count, last, module = Count(samples=24), Last(), seeded(Wrapped)
        settings: dict[str, Any] = {"schedule": "linear", "unit": "step", "start": end - 2, "end": end, "frequency": 1}
        fit(module, tmp_path, count, ChannelPruning(amount=0.5, **settings), last)
        assert count.events == steps
        assert all(torch.equal(value, last.weights[name]) for name, value in module.state_dict().items())
        assert count.report and any(row.layers for row in count.report.values())


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_with_compaction_averages_accumulation_and_other_precisions(tmp_path: Path, precision: str) -> None:
    """All together; the average changes by as much, and is as small in the end."""
    averaging = (
        [lightning_callbacks.EMAWeightAveraging(decay=0.9)]
        if hasattr(lightning_callbacks, "EMAWeightAveraging")
        else []
    )
    compaction, module, compensation = ModelCompaction(when=1, on_failure="raise"), seeded(Wrapped), Compensation(24)
    pruning = ChannelPruning(amount=0.5, schedule="linear", end=2)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": precision, "max_epochs": 4}
    fit(module, tmp_path, *averaging, compaction, compensation, pruning, **options)
    assert module.net.wide.out_channels == 8 and compaction.certificate.verified and compensation.report


METHODS = ("least_squares", "norms")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fit on two processes per method, one after the other: to start them takes as long as both."""
    folder, environment = tmp_path_factory.mktemp("ranks"), {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(Path(__file__).parents[1] / "ddp_compensation.py"), str(folder), *METHODS]
    subprocess.run(script, env=environment, cwd=folder, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_end_alike(fitted: Path, method: str) -> None:
    """On two processes with other data each: all weights before each step, bit for bit; taught by the dense model."""
    ranks = [torch.load(fitted / method / f"rank{n}.pt", weights_only=True) for n in (0, 1)]
    assert ranks[0]["rows"] == ranks[1]["rows"] and bool(ranks[0]["rows"]) == (method == "least_squares")
    assert all(rank["extra"] > 0 for rank in ranks)
    assert len(ranks[0]["steps"]) == len(ranks[1]["steps"]) == 18
    for one, other in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert ranks[0]["steps"][-1]["net.wide.weight"].shape[0] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "`method` must be one of"),
        ({"samples": 1}, "`samples` must be an integer >= 2"),
        ({"ridge": float("inf")}, "`ridge` must be a finite number >= 0, got inf"),
        ({"ridge": -1.0}, "`ridge` must be a number >= 0"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    """Each is refused by name."""
    with pytest.raises(MisconfigurationException, match=message):
        Compensation(**arguments)


class Flat(Wrapped):
    """The model takes something other than the loader gives."""

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model, whose call no hook sees."""
        return self.net.forward(x.unflatten(1, (3, 8, 8)))

    def train_dataloader(self) -> DataLoader:
        """Flat images."""
        return DataLoader([(x.flatten(), y) for x, y in data().dataset], batch_size=8)


def test_what_cannot_work_fails_before_the_first_epoch(tmp_path: Path) -> None:
    """Without a pruning of this model, and where the loader gives what the model does not take."""
    with pytest.raises(MisconfigurationException, match="needs a `ChannelPruning`"):
        fit(seeded(Wrapped), tmp_path, Compensation())
    module = seeded(Flat)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MisconfigurationException, match=r"matches the example input of `Net`"):
        options = {"example_input": torch.zeros(1, 3, 8, 8)}
        fit(module, tmp_path, Compensation(**options), ChannelPruning(**options))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
