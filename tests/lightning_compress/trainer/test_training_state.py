"""What steps and hooks leave for the next one: a compaction during the fit is refused where it would be another."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from engine.errors import VerificationError
from lightning_compress.trainer.training_state import attributes_of, options_of
from tests.lightning_compress.models import data
from tests.lightning_compress.test_entries import Module, Unused, trained


class _Weighed(Unused):
    """A number over all gradients weighs the next loss."""

    def _more(self) -> None:
        super()._more()
        self.weight = 1.0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Weigh the loss."""
        return super().training_step(batch) * self.weight

    def on_after_backward(self) -> None:
        """Weigh by a mean, which counts channels."""
        self.weight = float(self.net.wide.weight.grad.abs().mean())


class _Kept(Unused):
    """The last gradients are kept, and have the old sizes in the next step."""

    def _more(self) -> None:
        super()._more()
        self.last: dict[str, Tensor] = {}

    def on_after_backward(self) -> None:
        """Keep them."""
        self.last = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}


class _ByWidth(Unused):
    """A learning rate by a width."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Set it."""
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.1 / math.sqrt(self.net.wide.out_channels)
        return super().training_step(batch)


class _Carried(Unused):
    """A width that one validation leaves for the next step."""

    def _more(self) -> None:
        super()._more()
        self.scale = 1.0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Scale the loss."""
        return super().training_step(batch) * self.scale

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log a loss."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def val_dataloader(self) -> DataLoader[Any]:
        """Random images."""
        return data(8)

    def on_validation_epoch_end(self) -> None:
        """Leave it."""
        self.scale = 1 / math.sqrt(self.net.wide.out_channels)


class _Timed(Unused):
    """Times are other ones in each run, norms are the same for fewer channels."""

    def _more(self) -> None:
        super()._more()
        self.seconds, self.norms = 0.0, [0.0]

    def on_after_backward(self) -> None:
        """Note both."""
        self.seconds = time.perf_counter()
        self.norms.append(float(self.net.wide.weight.grad.norm()))


class _Decided(Unused):
    """A hook that raises with fewer channels."""

    def on_after_backward(self) -> None:
        """Count channels."""
        assert len(self.net.wide.weight.grad) == 12


class _Spread(Callback):
    """Keeps a deviation of a gradient."""

    spread = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Module, optimizer: Any) -> None:
        """Note it."""
        self.spread = float(pl_module.net.wide.weight.grad.std())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_Weighed, "'training_step'.* another value of 'weight'"),
        (_Kept, "another value of 'last.net"),
        (_ByWidth, "another value of 'lr of group 0 of optimizer 0 .SGD.'"),
        (_Carried, "'validation_step'.* another value of 'scale'"),
        (_Decided, "another value of 'an error in on_after_backward'"),
    ],
)
def test_what_would_be_another_is_refused(make: type[Module], what: str, tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(VerificationError, match=what):
        trained(make(), tmp_path, compact=True)


def test_of_callbacks(tmp_path: Path) -> None:
    """As well."""
    with pytest.raises(VerificationError, match=r"another value of 'callback \d ._Spread.\.spread'"):
        trained(Unused(), tmp_path, True, _Spread())


def test_what_no_run_repeats_is_not_compared(tmp_path: Path) -> None:
    """The fit goes on."""
    follow, _ = trained(_Timed(), tmp_path, compact=True)
    assert len(set(follow.sizes)) == 2


def test_whole_numbers_and_layers_do_not_count() -> None:
    """They are sizes, or count steps."""
    module = Unused()
    module.width, module.rate, module.kept = 8, 0.5, torch.ones(2)
    assert set(attributes_of(module, [])) == {"rate", "kept"}


def test_optimizers_and_callbacks_of_one_class_are_told_apart() -> None:
    """Two Adams of a GAN have a learning rate each, and two callbacks an average each."""
    optimizers = [torch.optim.Adam([torch.ones(1)], lr=lr) for lr in (0.1, 0.2)]
    assert {value for name, value in options_of(optimizers).items() if name.startswith("lr ")} == {0.1, 0.2}
    callbacks = _Spread(), _Spread()
    for callback, spread in zip(callbacks, (1.0, 2.0), strict=True):
        callback.spread = spread
    assert sorted(attributes_of(Unused(), callbacks).values()) == [1.0, 2.0]
