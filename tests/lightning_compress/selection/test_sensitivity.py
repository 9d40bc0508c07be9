"""Sensitivity analysis with a Trainer's validation as the metric, on one process and on two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from engine.errors import InputError
from lightning_compress import ChannelPruning, analyze_sensitivity, validation_metric
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Wrapped, data, fit, seeded, trainer

ROOT = Path(__file__).parents[3]
OPTIONS: dict[str, Any] = {"sparsities": [0.25, 0.5], "metric": "val_acc"}


class Measured(Wrapped):
    """Logs loss and accuracy; the accuracy waits for all ranks when it is computed, as torchmetrics do."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Loss and accuracy."""
        logits = self.logits(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_acc", self.accuracy)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        """Five batches, which two ranks could not share evenly."""
        return data(40)


class Data(LightningDataModule):
    """The same images."""

    def val_dataloader(self) -> DataLoader:
        """Five batches."""
        return data(40)


def quiet(folder: Path, **options: Any) -> Any:
    """A Trainer that validates on everything."""
    return trainer(folder, limit_val_batches=1.0, **options)


def by_hand(module: Measured) -> float:
    """Mean loss of the batches."""
    with torch.no_grad():
        return sum(F.cross_entropy(module.eval().logits(x), y).item() for x, y in module.val_dataloader()) / 5


def test_the_metric_is_that_of_validation(tmp_path: Path) -> None:
    """Baseline and rows are what a loop by hand gives for the masked weights; module and Trainer stay as they are."""
    module, run = seeded(Measured), quiet(tmp_path)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    table = analyze_sensitivity(run, module, sparsities=[0.5])
    assert list(table) == ["stem", "wide", "back", "fc"]
    assert module.training and all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert run.state.fn is None and module._trainer is None
    assert table.baseline == pytest.approx(by_hand(module), rel=1e-5)
    weakest = module.net.wide.weight.detach().flatten(1).abs().sum(1).argsort()[:8]
    with torch.no_grad():
        module.net.wide.weight[weakest] = 0
        module.net.wide.bias[weakest] = 0
    assert table["wide"][0.5] == pytest.approx(by_hand(module), rel=1e-5)


@pytest.mark.parametrize("source", ["datamodule", "dataloaders"])
def test_data_from_elsewhere(tmp_path: Path, source: str) -> None:
    """A datamodule, which keeps its Trainer, or dataloaders: the same table."""
    given = Data() if source == "datamodule" else data(40)
    module, run = seeded(Measured), quiet(tmp_path)
    assert analyze_sensitivity(run, module, **{source: given}, **OPTIONS) == analyze_sensitivity(run, module, **OPTIONS)
    assert source != "datamodule" or given.trainer is None


def test_groups_and_the_amounts_that_pruning_takes(tmp_path: Path) -> None:
    """Coupled layers have one row's numbers; what `suggest` returns masks that much of each group."""
    module = seeded(Measured)
    table = analyze_sensitivity(quiet(tmp_path), module, group=True, example_input=(1, 3, 8, 8), **OPTIONS)
    assert list(table) == ["stem", "wide", "back"] and table["stem"] == table["back"]
    amounts = table.suggest(1.0, better="higher")
    assert amounts == {"stem": 0.5, "wide": 0.5, "back": 0.5}
    pruning = ChannelPruning("l1", amount=amounts, end=0)
    fit(module, tmp_path, pruning, max_epochs=1)
    assert {name: int((~mask).sum()) for name, mask in ((n, pruning.masks[n]["bias"]) for n in ("wide", "back"))} == {
        "wide": 8,
        "back": 4,
    }


def test_an_interrupted_analysis_goes_on(tmp_path: Path) -> None:
    """Results are kept in the file: the second time nothing is validated, not even the un-pruned model."""
    module, path = seeded(Measured), tmp_path / "results.jsonl"
    first = analyze_sensitivity(quiet(tmp_path), module, results_path=path, **OPTIONS)
    assert len(path.read_text().splitlines()) == 1 + 4 * 2
    module.validation_step = None  # type: ignore[assignment, method-assign]
    assert analyze_sensitivity(quiet(tmp_path), module, results_path=path, **OPTIONS) == first


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"metric": "val_f1"}, MisconfigurationException, "logs val_acc, val_loss"),
        ({"model": "body"}, MisconfigurationException, "`model='body'`"),
        ({"group": True, "example_input": (1, 4, 8, 8)}, MisconfigurationException, "rejects the example input"),
        ({"sparsities": [2.0]}, InputError, "Each of `sparsities`"),
        ({"prune_type": "l3"}, InputError, "`prune_type`"),
        ({"specified_layers": ["head"]}, InputError, "'head'"),
        ({"datamodule": Data(), "dataloaders": data()}, Exception, "dataloader"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """A clear error, and the module as it was."""
    module = seeded(Measured)
    with pytest.raises(kind, match=message):
        analyze_sensitivity(quiet(tmp_path), module, **{**OPTIONS, **options})
    assert all(torch.equal(v, seeded(Measured).state_dict()[n]) for n, v in module.state_dict().items())


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `ddp_sensitivity.py` wrote to."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).parents[1] / "ddp_sensitivity.py")
    subprocess.run([sys.executable, script, str(folder)], env=environment, cwd=folder, check=True, timeout=300)
    return folder


def test_two_processes_give_the_table_of_one(two_processes: Path, tmp_path: Path) -> None:
    """On every rank, byte for byte; the layers were divided, and each has a results file of its own."""
    analyze_sensitivity(quiet(tmp_path), seeded(Measured), **OPTIONS).export(tmp_path / "one.csv")
    tables = {(two_processes / f"before{rank}.csv").read_bytes() for rank in (0, 1)}
    assert tables == {(tmp_path / "one.csv").read_bytes()}
    lines = [(two_processes / name).read_text().splitlines() for name in ("results.jsonl", "results.rank1.jsonl")]
    assert [len(part) for part in lines] == [1 + 2 * 2, 1 + 2 * 2]


def test_one_process_goes_on_where_two_were(two_processes: Path, tmp_path: Path) -> None:
    """All ranks' files are read: with them nothing is left to validate."""
    for path in two_processes.glob("results*.jsonl"):
        shutil.copy(path, tmp_path)
    module = seeded(Measured)
    module.validation_step = None  # type: ignore[assignment, method-assign]
    table = analyze_sensitivity(quiet(tmp_path), module, results_path=tmp_path / "results.jsonl", **OPTIONS)
    table.export(tmp_path / "one.csv")
    assert (tmp_path / "one.csv").read_bytes() == (two_processes / "before1.csv").read_bytes()


def test_within_a_running_fit(two_processes: Path, tmp_path: Path) -> None:
    """A callback may analyse: both ranks have the table of the weights at that time."""
    module = Measured()
    module.load_state_dict(torch.load(two_processes / "weights0.pt", weights_only=True))
    analyze_sensitivity(quiet(tmp_path), module, **OPTIONS).export(tmp_path / "one.csv")
    tables = {(two_processes / f"after{rank}.csv").read_bytes() for rank in (0, 1)}
    assert tables == {(tmp_path / "one.csv").read_bytes()}


def test_metrics_do_not_wait_for_other_ranks(tmp_path: Path) -> None:
    """Only those of the copy are told so."""
    module = seeded(Measured)
    own = MulticlassAccuracy(3).distributed_available_fn
    analyze_sensitivity(quiet(tmp_path), module, specified_layers=["fc"], **OPTIONS)
    assert module.accuracy.distributed_available_fn is own


class FromData(LightningDataModule):
    """Sets its data up when Lightning asks for it."""

    def setup(self, stage: str) -> None:
        """The images."""
        self.images = data(40)

    def val_dataloader(self) -> DataLoader:
        """Five batches."""
        return self.images


@pytest.mark.parametrize("source", ["datamodule", "dataloaders", "module"])
def test_coupled_layers_without_an_example(tmp_path: Path, source: str) -> None:
    """What the model takes comes from the validation data, wherever they are, as nothing has been trained on yet."""
    given = {"datamodule": {"datamodule": FromData()}, "dataloaders": {"dataloaders": data(40)}, "module": {}}[source]
    module = seeded(Measured)
    assert module.example_input_array is None
    table = analyze_sensitivity(quiet(tmp_path), module, **given, sparsities=[0.5], group=True)
    assert list(table) == ["stem", "wide", "back"] and table["stem"] == table["back"]
    net, example, evaluate = validation_metric(quiet(tmp_path), module, **given)
    assert example.shape == (2, 3, 8, 8) and evaluate(net) == pytest.approx(by_hand(module), rel=1e-5)
