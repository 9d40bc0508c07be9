"""Tests of finding averaged copies of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from engine.errors import PlanError
from lightning_compress.trainer.averages import averages
from tests.lightning_compress.models import Net, Wrapped, seeded


class Holder(Callback):
    """Holds a module, as averaging callbacks do."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module


def test_copies_that_callbacks_hold() -> None:
    """A copy of the LightningModule, bare (SWA) or averaged (WeightAveraging): the part of it that is compressed."""
    module = seeded(Wrapped)
    averaging, averaged = StochasticWeightAveraging(0.1), AveragedModel(module)
    averaging._average_model = copy.deepcopy(module)
    copies = averages([averaging, Holder(averaged), Holder(None)], module, "net")
    assert [path for path, _ in copies] == ["", ""]
    assert copies[0].module is averaging._average_model.net and copies[1].module is averaged.module.net


def test_a_plain_copy_that_a_callback_holds_is_not_an_average() -> None:
    """A teacher, or the best weights so far."""
    module = seeded(Wrapped)
    assert averages([Holder(copy.deepcopy(module))], module, "net") == []


def test_the_module_itself_and_strangers_are_no_copies() -> None:
    """Neither the LightningModule, nor one of other sizes, nor another module of a callback."""
    module = seeded(Wrapped)
    holders = [Holder(module), Holder(seeded(Wrapped, width=4)), Holder(nn.Linear(2, 2))]
    assert averages(holders, module, "net") == []


def test_an_average_inside_of_the_lightning_module() -> None:
    """An `AveragedModel` among the attributes is one; a plain copy (a teacher) is not."""
    module = seeded(Wrapped)
    module.teacher, module.ema = copy.deepcopy(module.net), AveragedModel(module.net)
    assert averages([], module, "net") == [("", module.ema.module)]


def test_an_average_of_a_part() -> None:
    """The part's path inside the model is found by its class and names."""
    module = seeded(Wrapped)
    module.net.head = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    module.ema = AveragedModel(module.net.head)
    assert averages([], module, "net") == [("head", module.ema.module)]


def test_an_average_of_one_of_two_alike() -> None:
    """Which of them cannot be told: an error that names them, and not a guess."""
    module = seeded(Wrapped)
    module.net.twins = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    module.ema = AveragedModel(module.net.twins[1])
    with pytest.raises(PlanError, match="'ema' may be an average of 'twins.0' or 'twins.1'"):
        averages([], module, "net")


def test_an_average_that_was_already_made_smaller_is_another() -> None:
    """Sizes count: what does not have the model's shapes cannot be cut like it."""
    module = seeded(Wrapped)
    module.ema = AveragedModel(Net(4))
    assert averages([], module, "net") == []
    assert torch.is_tensor(module.ema.n_averaged)
