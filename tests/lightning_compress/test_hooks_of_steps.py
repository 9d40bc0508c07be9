"""What a LightningModule does in `optimizer_step`, and around an epoch, is part of what is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_compress.trainer import steps
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.test_entries import Module, Unused, trained


class _Taught(Module):
    """A teacher whose weights follow those of the network, layer by layer, at some time."""

    def _more(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(x), y) + F.mse_loss(self.net(x), self.teacher(x).detach())

    def follow(self) -> None:
        """Move the teacher's weights."""
        with torch.no_grad():
            for mine, theirs in zip(self.net.state_dict().values(), self.teacher.state_dict().values(), strict=True):
                if mine.is_floating_point():
                    theirs.lerp_(mine, 0.1)


class _InOptimizerStep(_Taught):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Follow after each step."""
        super().optimizer_step(*args, **kwargs)
        self.follow()


class _BeforeEpoch(_Taught):
    def on_train_epoch_start(self) -> None:
        """Copy once per epoch."""
        self.teacher.load_state_dict(self.net.state_dict())


class _AfterEpoch(_Taught):
    def on_train_epoch_end(self) -> None:
        """Follow once per epoch."""
        self.follow()


class _Normalised(Unused):
    """Weights of norm 1 behind each step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        """Step, and normalise."""
        optimizer.step(closure=closure)
        with torch.no_grad():
            self.net.wide.weight /= self.net.wide.weight.norm()


class _Summary(Module):
    """Needs all batches of an epoch at its end."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        self.seen = batch_idx
        return F.cross_entropy(self.net(x), y)

    def on_train_epoch_end(self) -> None:
        """Look back."""
        if int(self.seen) != 2:
            raise RuntimeError("Where are the others?")


def _gap(make: Callable[[], Module], folder: Path) -> float:
    modules = make(), make()
    masked, _ = trained(modules[0], folder / "masked", compact=False)
    followed, _ = trained(modules[1], folder / "compacted", compact=True)
    assert len(set(followed.sizes)) == 2, followed.sizes
    pairs = zip(masked.losses, followed.losses, strict=True)
    return max(float((a - b).abs() / a.abs().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize("make", [_InOptimizerStep, _BeforeEpoch, _AfterEpoch])
def test_the_fit_goes_on(make: Callable[[], Module], tmp_path: Path) -> None:
    """As it does with masks."""
    assert _gap(make, tmp_path) <= 1e-9


def test_what_reads_whole_weights_behind_a_step_is_refused(tmp_path: Path) -> None:
    """At setup, with the line that stands against it."""
    with pytest.raises(MisconfigurationException, match=r"Nothing can be pruned.*norm .*test_hooks_of_steps.py"):
        trained(_Normalised(), tmp_path, compact=True)


def test_without_the_hooks_of_an_epoch_another_teacher_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channels are cut as those of a layer by itself."""
    monkeypatch.setattr(steps, "_EPOCH", ())
    assert _gap(_AfterEpoch, tmp_path) > 1e-6


def test_an_epoch_that_needs_all_batches_is_named(tmp_path: Path) -> None:
    """The step is recorded without it."""
    with pytest.warns(UserWarning, match="on_train_epoch_end cannot be recorded.*Where are the others"):
        assert _gap(_Summary, tmp_path) <= 1e-9
