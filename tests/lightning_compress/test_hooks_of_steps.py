"""What a LightningModule does in `optimizer_step`, and around an epoch, is part of what is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_compress.callbacks.base import step_entries
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import data
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


class _Watched(Module):
    """Validates, too."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A metric."""
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self) -> DataLoader:
        """The random images."""
        return data(8)


class _Validated(_Taught):
    """A teacher, and validation."""

    validation_step, val_dataloader = _Watched.validation_step, _Watched.val_dataloader


class _AfterValidation(_Validated):
    def on_validation_epoch_end(self) -> None:
        """Follow once per validation, if it is better."""
        if self.trainer.validating and float(self.trainer.callback_metrics["val_loss"]) > 0:
            self.follow()


class _BeforeValidation(_Validated):
    def on_validation_epoch_start(self) -> None:
        """Copy once per validation."""
        self.follow()


class _Probe(_Watched):
    """A metric that is read off a row of a weight."""

    def on_validation_epoch_end(self) -> None:
        """Log it."""
        self.log("row", self.net.wide.weight[7].sum())


class _ProbeOfTest(_Watched):
    """The same after a test."""

    test_step, test_dataloader = _Watched.validation_step, _Watched.val_dataloader

    def on_test_epoch_end(self) -> None:
        """Log it."""
        self.log("row", self.net.wide.weight[7].sum())


class _Shifted(_Watched):
    """Batches are moved by what a row of a weight says."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        """Shift images."""
        return [batch[0] + self.net.wide.weight[7].sum(), batch[1]]


class _BeforeBackward(_Watched):
    """A row of a weight before the backward pass."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Log it."""
        self.log("row", self.net.wide.weight[7].sum())


class _Summary(Module):
    """Needs all batches of an epoch at its end."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        self.seen = batch_idx
        return F.cross_entropy(self.net(x), y)

    def on_train_epoch_end(self) -> None:
        """Look back."""
        if int(self.seen) != 2:
            raise RuntimeError("Where are the others?")


class _SummaryOfRow(_Summary):
    """Reads a weight then."""

    def on_train_epoch_end(self) -> None:
        """Look back, and at a row."""
        super().on_train_epoch_end()
        self._look()

    def _look(self) -> None:
        self.log("row", self.net.wide.weight[7].sum())


TAUGHT = [_InOptimizerStep, _BeforeEpoch, _AfterEpoch, _AfterValidation, _BeforeValidation]


def _gap(make: Callable[[], Module], folder: Path) -> float:
    modules = make(), make()
    masked, _ = trained(modules[0], folder / "masked", compact=False)
    followed, _ = trained(modules[1], folder / "compacted", compact=True)
    assert len(set(followed.sizes)) == 2, followed.sizes
    pairs = zip(masked.losses, followed.losses, strict=True)
    return max(float((a - b).abs() / a.abs().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize("make", TAUGHT)
def test_the_fit_goes_on(make: Callable[[], Module], tmp_path: Path) -> None:
    """As it does with masks."""
    assert _gap(make, tmp_path) <= 1e-9


def test_what_reads_whole_weights_behind_a_step_is_refused(tmp_path: Path) -> None:
    """At setup, with the line that stands against it."""
    with pytest.raises(MisconfigurationException, match=r"Nothing can be pruned.*norm .*test_hooks_of_steps.py"):
        trained(_Normalised(), tmp_path, compact=True)


@pytest.mark.filterwarnings("ignore:on_train_epoch_end cannot be traced")
@pytest.mark.parametrize("make", [_Probe, _ProbeOfTest, _SummaryOfRow, _Shifted, _BeforeBackward])
def test_what_a_hook_reads_stays(make: type[Module], tmp_path: Path) -> None:
    """Whether it runs, or its code says so."""
    with pytest.raises(MisconfigurationException, match="net.wide: (select .*picks single|is an output of the model)"):
        trained(make(), tmp_path, compact=True)


@pytest.mark.parametrize("make", [_AfterEpoch, _AfterValidation])
def test_without_its_hooks_another_teacher_follows(
    make: type[Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its channels are cut as those of a layer by itself."""
    names = step_entries.__globals__  # those of the module itself, which doctests of it may have imported anew
    monkeypatch.setitem(names, "around", lambda kind: ((), ()))
    assert _gap(make, tmp_path) > 1e-6


def test_an_epoch_that_needs_all_batches_is_named(tmp_path: Path) -> None:
    """The step is recorded without it."""
    with pytest.warns(UserWarning, match="on_train_epoch_end cannot be traced.*Where are the others"):
        assert _gap(_Summary, tmp_path) <= 1e-9


def late(epoch: int) -> float:
    """A schedule that lies elsewhere, and is not zero for long."""
    return 0.1 if 5 <= epoch < 7 else 0.0


class _Scheduled(_Watched):
    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = super()._loss(x, y, batch_idx)
        return loss + self.net.wide.weight[7].sum() if late(self.current_epoch) else loss


class _Own(Callback):
    """What it keeps is its own."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.average = torch.zeros((), dtype=torch.float64)


class _Averaging(_Own):
    """An average of a weight, by hand."""

    def on_train_batch_end(self, trainer: Any, pl_module: Module, *rest: Any) -> None:
        """Follow."""
        self.calls.append(trainer.global_step)
        self.average = self.average * 0.9 + pl_module.net.wide.weight.detach()


class _Reading(_Own):
    """A row of a weight at the end of a validation."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Module) -> None:
        """Log it."""
        pl_module.log("row", pl_module.net.wide.weight[7].sum())


class _Decaying(_Own):
    """Decay of weights, and a mean of outputs: both are the same for a smaller network."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, *rest: Any) -> None:
        """Decay, and keep a mean."""
        self.calls.append(trainer.global_step)
        self.average += pl_module.net(batch[0]).mean()
        for parameter in pl_module.parameters():
            parameter.mul_(0.99)


def test_a_schedule_elsewhere_is_asked_at_its_numbers(tmp_path: Path) -> None:
    """The number of the epoch notes what it is compared with."""
    with pytest.raises(MisconfigurationException, match="net.wide: select .*picks single"):
        trained(_Scheduled(), tmp_path, compact=True)


@pytest.mark.parametrize("kind", [_Averaging, _Reading])
def test_what_callbacks_read_stays(kind: type[_Own], tmp_path: Path) -> None:
    """Their hooks run with the step, as copies."""
    callback = kind()
    with pytest.raises(MisconfigurationException, match="net.wide: (outlives|select) .*test_hooks_of_steps.py"):
        trained(_Watched(), tmp_path, True, callback)
    assert not callback.calls and not callback.average


def test_callbacks_that_change_each_weight_by_itself(tmp_path: Path) -> None:
    """They go on as with masks, and note no call but the Trainer's."""
    callbacks = _Decaying(), _Decaying()
    losses = [trained(_Watched(), tmp_path / str(n), bool(n), c)[0].losses for n, c in enumerate(callbacks)]
    assert max(float((a - b).abs() / a.abs()) for a, b in zip(*losses, strict=True)) <= 1e-9
    assert [callback.calls for callback in callbacks] == [list(range(1, 10))] * 2
    assert torch.allclose(callbacks[0].average, callbacks[1].average, rtol=1e-9, atol=0)


class _Teaching(Callback):
    """Keeps a copy of the dense module."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Copy it."""
        self.teacher = copy.deepcopy(pl_module)
        self.before = copy.deepcopy(pl_module.state_dict())


@pytest.mark.parametrize("compact", [False, True])
def test_a_copy_that_a_callback_keeps_stays_as_it_is(compact: bool, tmp_path: Path) -> None:
    """It is neither masked nor compacted, and making it does not keep channels."""
    module, callback = _Watched(), _Teaching()
    trained(module, tmp_path, compact, callback)
    after = callback.teacher.state_dict()
    assert callback.before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in callback.before.items())
    assert module.net.wide.weight.shape[0] == (6 if compact else 12)


class _AveragingByHand(_Teaching):
    """Moves the copy's weights, too."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Follow after each step."""
        with torch.no_grad():
            for theirs, mine in zip(self.teacher.parameters(), pl_module.parameters(), strict=True):
                theirs.lerp_(mine, 0.1)


def test_layers_that_can_no_longer_be_pruned_are_named(tmp_path: Path) -> None:
    """When the fit starts, there is no copy yet, so that nothing has a fixed size."""
    with pytest.warns(UserWarning, match="could be pruned when the fit started, and no longer can .*: lerp of"):
        trained(_Watched(), tmp_path, True, _AveragingByHand())


class _SearchingAgain(LearningRateFinder):
    """Searches for a learning rate in some epochs, as in Lightning's documentation."""

    def on_fit_start(self, *args: Any) -> None:
        """Do not search here."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Search in the second epoch."""
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def test_a_search_for_a_learning_rate_does_not_run(tmp_path: Path) -> None:
    """It is a fit of its own, which restores everything; the fit goes on as with masks."""
    losses = []
    for compact in (False, True):
        search = _SearchingAgain(num_training_steps=3, update_attr=False)
        losses.append(trained(_Watched(), tmp_path / str(compact), compact, search)[0].losses)
        assert search.optimal_lr is not None
    assert max(float((a - b).abs() / a.abs()) for a, b in zip(*losses, strict=True)) <= 1e-9


class _Validating(Callback):
    """Starts a loop of the Trainer."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Validate in between."""
        trainer.fit_loop.epoch_loop.val_loop.run()


def test_a_hook_that_runs_the_trainer_is_named(tmp_path: Path) -> None:
    """Nothing of the Trainer is changed by the recording, and what the hook names stays."""
    with pytest.warns(UserWarning, match="_Validating.on_train_epoch_end cannot be traced.*The Trainer does not run"):
        trained(_Watched(), tmp_path, True, _Validating())


class _SteppedSchedule(_Watched):
    """Shifts a weight whenever the learning rate is scheduled."""

    def configure_optimizers(self) -> Any:
        """With a schedule."""
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Subtract the mean, and step."""
        with torch.no_grad():
            self.net.wide.weight.sub_(self.net.wide.weight.mean())
        scheduler.step()


class _HookedOptimizer(_Watched):
    """Has an optimizer with a hook that subtracts the mean of a weight behind each step."""

    def configure_optimizers(self) -> Any:
        """With the hook."""
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.centre)
        return optimizer

    def centre(self, *arguments: Any) -> None:
        """Subtract the mean."""
        with torch.no_grad():
            self.net.wide.weight.sub_(self.net.wide.weight.mean())


@pytest.mark.parametrize("make", [_SteppedSchedule, _HookedOptimizer])
def test_what_runs_around_the_optimizer_counts(make: type[Module], tmp_path: Path) -> None:
    """It reads weights as a whole."""
    with pytest.raises(
        MisconfigurationException, match=r"net.wide: mean of 'training_step' \(.*test_hooks_of_steps.py"
    ):
        trained(make(), tmp_path, compact=True)


class _Decayed(_HookedOptimizer):
    """The hook changes each entry by itself, and counts."""

    calls = 0

    def centre(self, *arguments: Any) -> None:
        """Decay."""
        self.calls += 1
        with torch.no_grad():
            self.net.wide.weight.mul_(0.99)


def test_a_hook_of_the_optimizer_that_may_be_cut(tmp_path: Path) -> None:
    """The fit goes on as with masks; the hook runs as often as there are steps."""
    assert _gap(_Decayed, tmp_path) <= 1e-9
    module = _Decayed()
    trained(module, tmp_path / "again", True)
    assert module.calls == 9


class _Momentum(_Watched):
    """Penalises the mean momentum."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        state = self.optimizers().state.get(self.net.wide.weight, {})
        return super()._loss(x, y, batch_idx) + (state["momentum_buffer"].mean() if state else 0)


def test_a_step_that_reads_the_optimizers_state_is_refused(tmp_path: Path) -> None:
    """Its entries go with the channels, and no program says how the step reads them then."""
    with pytest.raises(MisconfigurationException, match="reads the state of an optimizer"):
        trained(_Momentum(), tmp_path, compact=True)
