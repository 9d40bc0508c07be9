"""What code names."""

from __future__ import annotations

from typing import Any

import pytest
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn

from lightning_compress.trainer.named_tensors import codes_of, named_tensors


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"stem": nn.Linear(3, 4), "fc": nn.Linear(4, 2)})
        self.teacher = nn.Linear(3, 2)

    def one(self) -> Tensor:
        """One of them."""
        return self.net.fc.weight

    def two(self) -> Tensor:
        """Another, in a function inside."""
        return [self.teacher.bias for _ in range(1)][0]

    def call(self) -> Any:
        """Both, in another method; names are taken without their order."""
        return self.one(), self.two()

    def layers(self) -> Any:
        """All of a module."""
        return self.net["fc"]

    def every(self) -> Any:
        """All that there are."""
        return list(self.parameters())

    def elsewhere(self) -> Any:
        """Who knows what."""
        return len(str(self))

    def none(self) -> Any:
        """Nothing."""
        return self.trainer.current_epoch


ALL = {"net.stem.weight", "net.stem.bias", "net.fc.weight", "net.fc.bias", "teacher.weight", "teacher.bias"}
NAMED = {
    "one": {"net.fc.weight"},
    "two": {"teacher.bias"},
    "call": {"net.fc.weight", "net.fc.bias", "teacher.weight", "teacher.bias"},
    "layers": {name for name in ALL if name.startswith("net")},
    "every": ALL,
    "elsewhere": ALL,
    "none": set(),
}


def _names(module: LightningModule, tensors: list[Tensor]) -> set[str]:
    places = {tensor.data_ptr(): name for name, tensor in module.named_parameters()}
    return {places[tensor.data_ptr()] for tensor in tensors}


@pytest.mark.parametrize("method", NAMED)
def test_methods_of_a_module(method: str) -> None:
    """With those that they name; whatever may reach everything reads everything."""
    module = _Module()
    assert _names(module, named_tensors(getattr(_Module, method), module, module)) == NAMED[method]


class _Reading(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Read."""
        self.seen = pl_module.teacher.bias

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Pass it on."""
        self.seen = str(pl_module)


def test_hooks_of_callbacks() -> None:
    """They get the module as an argument."""
    module, callback = _Module(), _Reading()
    assert _names(module, named_tensors(_Reading.on_train_epoch_end, callback, module)) == {"teacher.bias"}
    assert _names(module, named_tensors(_Reading.on_train_epoch_start, callback, module)) == ALL


class _Data(LightningDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Look at nothing but the batch."""
        return [batch[0].flip(-1), *batch[1:]] if self.trainer.training else batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Look at the module."""
        return [batch[0] + self.trainer.lightning_module.teacher.bias]


def test_hooks_of_data_modules() -> None:
    """Their arguments are batches, not the Trainer and the module."""
    module, owner = _Module(), _Data()
    assert not named_tensors(_Data.on_after_batch_transfer, owner, module)
    assert _names(module, named_tensors(_Data.on_before_batch_transfer, owner, module)) == ALL


def test_what_has_no_code() -> None:
    """Nothing can be said of it."""
    assert not list(codes_of(len)) and len(list(codes_of(_Module.two))) >= 1
