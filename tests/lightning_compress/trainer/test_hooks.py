"""Hooks behind a backward pass."""

from __future__ import annotations

from typing import Any

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
