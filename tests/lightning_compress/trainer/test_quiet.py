"""A Trainer that does nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from pytorch_lightning import Trainer

from lightning_compress.trainer.quiet import own_hooks, quiet
from tests.lightning_compress.models import Wrapped


def test_nothing_is_logged_or_changed() -> None:
    """What is logged is noted; the Trainer is the module's own again afterwards."""
    module, trainer = Wrapped(), Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    trainer.strategy._optimizers = [optimizer]
    with quiet(module, trainer, {"current_epoch": 7}) as record:
        module.log("loss", torch.ones(()))
        assert module.current_epoch == 7 and float(record.values[0]) == 1
        module.net.fc.weight.grad = torch.ones_like(module.net.fc.weight)
        before = module.net.fc.weight.detach().clone()
        module.optimizers().step()
    assert torch.equal(before, module.net.fc.weight) and module.trainer is trainer and module.current_epoch == 0


def test_the_trainer_does_not_run() -> None:
    """Neither its loops nor those inside of them; what code sets there is kept by the stub."""
    module, trainer = Wrapped(), Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    inner = trainer.fit_loop.epoch_loop
    with quiet(module, trainer, {}):
        still = module.trainer
        for run in (still.fit_loop.run, still.fit_loop.epoch_loop.val_loop.run, still.validate, still.fit):
            with pytest.raises(RuntimeError, match="does not run while a step is recorded"):
                run()
        still.fit_loop.epoch_loop.max_steps = 3
        assert still.fit_loop.epoch_loop.max_steps == 3 and isinstance(still.fit_loop, type(trainer.fit_loop))
        still._checkpoint_connector.restore("nothing.ckpt")
    assert trainer.fit_loop.epoch_loop is inner and inner.max_steps == -1


def test_a_module_can_be_copied() -> None:
    """A hook may keep a copy of the LightningModule: of neither the stubs nor the Trainer behind them."""
    module, trainer = Wrapped(), Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    trainer.strategy._optimizers = [torch.optim.SGD(module.parameters(), 1.0)]
    with quiet(module, trainer, {"current_epoch": 7}):
        module.log("loss", module.net.fc.weight.sum())  # no leaf, of which torch makes no copies
        module.kept = module.optimizers()
        other, still = copy.deepcopy(module), copy.copy(module.trainer)
        still.current_epoch = 8
        assert module.current_epoch == 7 and still.max_epochs == trainer.max_epochs
    assert other.kept is module.kept and torch.equal(other.net.fc.weight, module.net.fc.weight)


def test_an_optimizer_without_tables_of_hooks() -> None:
    """Optimizers around another one may leave the constructor of torch's class out: they have no hooks."""
    optimizer = torch.optim.SGD.__new__(torch.optim.SGD)
    assert own_hooks(optimizer) == ([], [])
