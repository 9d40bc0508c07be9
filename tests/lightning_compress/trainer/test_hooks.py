"""Hooks behind a backward pass."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler, LambdaCallback

from lightning_compress import ChannelPruning
from lightning_compress.trainer.hooks import GradientHooks, Hooks
from tests.lightning_compress.models import Wrapped


class Noting(Callback):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the Trainer."""
        self.seen.append(trainer)
        pl_module.net.fc.weight.grad.zero_()


def _module(*callbacks: Callback) -> LightningModule:
    module = Wrapped()
    module.trainer = Trainer(accelerator="cpu", logger=False, callbacks=list(callbacks))
    return module


def test_there_are_none() -> None:
    """Callbacks of Lightning, and those of this package, are none."""
    module = _module(GradientAccumulationScheduler({1: 2}), ChannelPruning())
    hooks = Hooks(module, GradientHooks.names())
    assert not hooks.callbacks and not any(map(hooks.has, GradientHooks.names()))


def test_a_callback_runs_as_a_copy() -> None:
    """It acts on gradients, and keeps no note of it."""
    callback = Noting()
    module = _module(callback)
    module.net.fc.weight.grad = torch.ones_like(module.net.fc.weight)
    hooks = GradientHooks(module, lambda: None)
    hooks()
    assert not module.net.fc.weight.grad.any() and not callback.seen


def _zero(*arguments: Any) -> None:
    """Let the gradient of a layer be zero."""
    arguments[-1].net.fc.weight.grad.zero_()


def test_hooks_that_are_attributes() -> None:
    """Of a callback, as `LambdaCallback` has them, and of the LightningModule itself."""
    assigned = Callback()
    assigned.on_after_backward = _zero  # type: ignore[method-assign]
    for callbacks, own in (([LambdaCallback(on_after_backward=_zero)], False), ([assigned], False), ([], True)):
        module: Any = _module(*callbacks)
        if own:
            module.on_after_backward = lambda module=module: _zero(module)
        module.net.fc.weight.grad = torch.ones_like(module.net.fc.weight)
        hooks = GradientHooks(module, lambda: None)
        hooks()
        assert not module.net.fc.weight.grad.any()


class Stops(Callback):
    """Ends a fit in its fashion."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop."""
        if self.error is None:
            signal.raise_signal(signal.SIGINT)
        else:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), ValueError()])
def test_what_stops_a_fit_stops_no_recording(error: BaseException) -> None:
    """A hook that stops a fit at some step runs in a recording too."""
    module = _module(Stops(error))
    hooks = Hooks(module, ["on_train_batch_end"])
    hooks.run("on_train_batch_end", None, None, 0)
    assert list(hooks.failures.values()) == [error] and hooks.failed == {"Stops.on_train_batch_end"}


def test_an_interrupt_that_arrives_in_a_hook_is_one() -> None:
    """It is Ctrl-C, and not the hook's doing."""
    hooks = Hooks(_module(Stops(None)), ["on_train_batch_end"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores further ones behind the first
    try:
        with pytest.raises(KeyboardInterrupt):
            hooks.run("on_train_batch_end", None, None, 0)
    finally:
        signal.signal(signal.SIGINT, before)
