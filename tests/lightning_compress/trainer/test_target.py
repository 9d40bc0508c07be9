"""Which model is compressed, and the example input that it is traced with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    CompressionReport,
    MaskConflictRepair,
    ModelCompaction,
    SparseTraining,
)
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.target import batch_candidates, describe, find_model, first_batch
from tests.lightning_compress.models import Base, Net, Root, Wrapped, data, fit, seeded


def test_model_is_the_only_network_attribute() -> None:
    """Without `forward` the only child with parameters is the model; metrics and losses are none."""
    module = Wrapped()
    assert find_model(module) == ("net", module.net)


def test_model_is_the_module_itself() -> None:
    """Where `forward` is overridden the LightningModule is the model."""
    module = Root()
    assert find_model(module) == ("", module)


def test_model_by_path() -> None:
    """A path names any submodule, the empty one the LightningModule; a wrong one is an error that names the
    children.
    """
    module = Wrapped()
    assert find_model(module, "net.stem") == ("net.stem", module.net.stem)
    assert find_model(module, "") == ("", module)
    with pytest.raises(MisconfigurationException, match=r"model='backbone'.*children are: net, accuracy, loss"):
        find_model(module, "backbone")


def test_ambiguous_model_is_an_error() -> None:
    """Two networks, or none, are errors; the candidates are named."""
    module = Wrapped()
    module.teacher = Net()
    with pytest.raises(MisconfigurationException, match=r"2 candidates \(net, teacher\)"):
        find_model(module)
    with pytest.raises(MisconfigurationException, match="has none"):
        find_model(LightningModule())


class Spy(ComplexityMonitor):
    """Keeps the example input."""

    seen: Any = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Look it up."""
        self.seen = self.example(trainer, pl_module)


def seen(module: Base, folder: Path, **arguments: Any) -> Any:
    """The example input that a callback finds."""
    spy = Spy(**arguments)
    fit(module, folder, spy, max_epochs=1)
    return spy.seen


def test_example_from_the_first_batch(tmp_path: Path) -> None:
    """Without anything else the images of the first batch are taken, two of them, and no label."""
    assert torch.equal(seen(Wrapped(), tmp_path), next(iter(data()))[0][:2])


def test_example_input_array_comes_before_the_batch(tmp_path: Path) -> None:
    """`example_input_array` is used where there is one."""
    module = Wrapped()
    module.example_input_array = torch.ones(1, 3, 6, 6)
    assert torch.equal(seen(module, tmp_path), torch.ones(1, 3, 6, 6))


def test_argument_comes_first(tmp_path: Path) -> None:
    """The argument wins, be it a tensor, a tuple of arguments or a shape."""
    module = Wrapped()
    module.example_input_array = torch.ones(1, 3, 6, 6)
    assert seen(module, tmp_path, example_input=torch.ones(1, 3, 5, 5)).shape[-1] == 5
    assert seen(module, tmp_path, example_input=(torch.ones(1, 3, 4, 4),))[0].shape[-1] == 4
    assert seen(module, tmp_path, example_input=[1, 3, 7, 7]).shape == (1, 3, 7, 7)


def test_example_has_the_trainers_precision(tmp_path: Path) -> None:
    """In double precision the example input is double too."""
    spy = Spy()
    fit(Wrapped(), tmp_path, spy, max_epochs=1, precision="64-true")
    assert spy.seen.dtype == torch.float64


def test_random_states_are_untouched_by_the_first_batch(tmp_path: Path) -> None:
    """A shuffling loader draws from the global generators; training goes on as if no batch had been drawn."""
    loader = DataLoader(data().dataset, batch_size=8, shuffle=True)
    torch.manual_seed(3)
    numpy.random.seed(3)
    before = torch.get_rng_state(), numpy.random.get_state()[1].copy()
    first_batch(SimpleNamespace(train_dataloader=loader))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == numpy.random.get_state()[1]).all()


@pytest.mark.parametrize("loader", [None, {"a": data()}, [data(), data()]])
def test_no_example_input_is_an_error(loader: object) -> None:
    """No loader or several: the error says what to pass."""
    with pytest.raises(MisconfigurationException, match="no example input.*example_input=torch.ones"):
        first_batch(SimpleNamespace(train_dataloader=loader))


def test_empty_loader_is_an_error() -> None:
    """An empty loader gives no example input."""
    with pytest.raises(MisconfigurationException, match="empty"):
        first_batch(SimpleNamespace(train_dataloader=[].__iter__()))


@pytest.mark.parametrize(
    "callback",
    [ChannelPruning, ComplexityMonitor, CompressionReport, MaskConflictRepair, ModelCompaction, SparseTraining],
)
def test_rejected_example_is_one_error_before_training(tmp_path: Path, callback: type) -> None:
    """An example input with the wrong channels fails before the first step; it is named, and the weights are as
    before.
    """
    module = seeded(Wrapped)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(
        MisconfigurationException, match=r"`Net` rejects the example input from the argument.*1, 4, 8, 8"
    ):
        fit(module, tmp_path, callback(example_input=torch.ones(1, 4, 8, 8)))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not list(tmp_path.rglob("*.ckpt"))


def test_rejected_example_input_array_is_named(tmp_path: Path) -> None:
    """The error says where the example input came from."""
    module = Wrapped()
    module.example_input_array = torch.ones(1, 5, 8, 8)
    with pytest.raises(MisconfigurationException, match=r"rejects the example input from `example_input_array`"):
        fit(module, tmp_path, ComplexityMonitor())


class Pair(nn.Module):
    """Takes two arguments."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum."""
        return a + b


def test_batch_candidates() -> None:
    """A batch gives its first element, then the first two, …; a mapping the names that `forward` has, then all."""
    a, b = torch.ones(2, 3), torch.ones(2)
    assert describe(list(batch_candidates((a, b), Pair()))[1]) == "(Tensor[2, 3], Tensor[2])"
    keywords = list(batch_candidates({"a": a, "b": a, "label": b}, Pair()))
    assert [describe(c) for c in keywords] == [
        "{a: Tensor[2, 3], b: Tensor[2, 3]}",
        "{a: Tensor[2, 3], b: Tensor[2, 3], label: Tensor[2]}",
        "({a: Tensor[2, 3], b: Tensor[2, 3], label: Tensor[2]})",
    ]
