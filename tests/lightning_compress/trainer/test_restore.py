"""Compacted checkpoints in Lightning's own ways of loading."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

import engine
from engine.compaction.history import history
from engine.errors import CheckpointError
from engine.files.checkpoint import KEY, seal
from lightning_compress import ChannelPruning, Compactable, ModelCompaction, load_compacted
from tests.lightning_compress.models import Base, Net, Reference, Wrapped, data, difference, fit, seeded, trainer


class Mixed(Compactable, Base):
    """A module with the mixin."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(width)

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self.net(x)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Keep the outputs."""
        self.seen = self.logits(batch[0])

    predict_step = test_step

    def test_dataloader(self) -> Any:
        """The random images."""
        return data(8)

    predict_dataloader = test_dataloader


class Hooked(Mixed):
    """Overrides the hooks without calling those of the mixin, as users do."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Nothing."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mixed, Path, Path]:
    """A compacted module, its checkpoint, and the best one of before the compaction."""
    folder = tmp_path_factory.mktemp("fit")
    compaction, saver = ModelCompaction(on_failure="raise"), ModelCheckpoint(folder, filename="best")
    module = seeded(Mixed)
    callbacks = [Reference(), ChannelPruning(amount=0.5), compaction, saver]
    fit(module, folder, *callbacks, enable_checkpointing=True)
    assert compaction.checkpoint_path is not None and module.net.wide.out_channels == 8
    return module, Path(compaction.checkpoint_path), folder / "best.ckpt"


def outputs(module: Mixed) -> Tensor:
    """What the module puts out for the test images."""
    with torch.no_grad():
        return module.eval().logits(next(iter(data(8)))[0])


@pytest.mark.parametrize("stage", ["test", "validate", "predict"])
@pytest.mark.parametrize("cls", [Mixed, Wrapped])
def test_ckpt_path(tmp_path: Path, compacted: Any, stage: str, cls: type[Base]) -> None:
    """A fresh module takes the compacted checkpoint in every stage: by the mixin, or by the callback."""
    small, path, _ = compacted
    module = cls()
    callbacks = [] if cls is Mixed else [ModelCompaction()]
    runner = trainer(tmp_path, *callbacks, limit_val_batches=1)
    module.test_step = lambda batch, batch_idx: None
    module.predict_step = lambda batch, batch_idx: batch
    getattr(runner, stage)(module, data(8), ckpt_path=str(path))
    assert torch.equal(outputs(module), outputs(small)) and module.net.wide.out_channels == 8


@pytest.mark.parametrize("cls", [Mixed, Hooked])
def test_load_from_checkpoint(compacted: Any, cls: type[Mixed]) -> None:
    """Lightning's own classmethod takes compacted and un-compacted files, whatever hooks the class overrides."""
    small, path, best = compacted
    loaded = cls.load_from_checkpoint(path)
    assert torch.equal(outputs(loaded), outputs(small)) and len(history(loaded.net)) == 1
    assert cls.load_from_checkpoint(best).net.wide.out_channels == 16
    assert cls.load_from_checkpoint(best, weights_only=False).net.wide.out_channels == 16


def test_best_grows_back(tmp_path: Path, compacted: Any) -> None:
    """`trainer.test(ckpt_path="best")` after a compaction tests the network of before it, with a warning."""
    saver, module = ModelCheckpoint(tmp_path, filename="best"), seeded(Mixed)
    callbacks = [ChannelPruning(amount=0.5), ModelCompaction(on_failure="raise"), saver]
    runner = fit(module, tmp_path, *callbacks, enable_checkpointing=True)
    assert module.net.wide.out_channels == 8
    advice = r"grows back.*best.ckpt was written before.*trainer.test\(module, ckpt_path='.*compacted.*'\).*compact_c"
    with pytest.warns(UserWarning, match=advice):
        runner.test(module, ckpt_path="best", verbose=False)
    assert module.net.wide.out_channels == 16 and not history(module.net)
    expected = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    runner.test(module, ckpt_path=callbacks[1].checkpoint_path, verbose=False)  # as the warning says
    assert module.net.wide.out_channels == 8


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_fit_that_goes_back_is_advised_otherwise(tmp_path: Path) -> None:
    """Who trains on from before a compaction needs a new optimizer, and is told so."""
    saver, module = ModelCheckpoint(tmp_path, filename="best"), seeded(Mixed)
    fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(), saver, enable_checkpointing=True)
    again = trainer(tmp_path, max_epochs=4)
    with pytest.warns(UserWarning, match="grows back.*a new optimizer"):
        again.fit(module, ckpt_path=saver.best_model_path)


@pytest.mark.parametrize("cls", [Mixed, Hooked])
def test_training_goes_on(tmp_path: Path, compacted: Any, cls: type[Mixed]) -> None:
    """A fit of the compacted module, interrupted and resumed with its optimizer state, ends with the same bits."""
    _, path, _ = compacted
    whole, first, second = (cls.load_from_checkpoint(path) for _ in range(3))
    fit(whole, tmp_path, max_epochs=4)
    fit(first, tmp_path, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    second = cls()
    resumed = trainer(tmp_path, max_epochs=4)
    resumed.fit(second, ckpt_path=str(tmp_path / "half.ckpt"))
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), second.state_dict().values(), strict=True)
    )
    state = resumed.optimizers[0].state
    assert all(state[p]["momentum_buffer"].shape == p.shape for p in second.parameters())


def test_every_file_of_lightning_loads(tmp_path: Path, compacted: Any) -> None:
    """Whatever Lightning saves of a compacted module, weights alone too, holds what it takes to load it."""
    _, path, _ = compacted
    module = Hooked.load_from_checkpoint(path)
    runner = fit(module, tmp_path, max_epochs=1)
    for weights_only in (True, False):
        runner.save_checkpoint(tmp_path / "again.ckpt", weights_only=weights_only)
        assert torch.equal(outputs(load_compacted(tmp_path / "again.ckpt", Mixed)), outputs(module))
        assert torch.equal(outputs(Mixed.load_from_checkpoint(tmp_path / "again.ckpt")), outputs(module))


def test_compacted_twice(tmp_path: Path, compacted: Any) -> None:
    """A module that is compacted again stores both plans, and loads from the second checkpoint alone."""
    _, path, _ = compacted
    module, compaction = Mixed.load_from_checkpoint(path), ModelCompaction(on_failure="raise")
    fit(module, tmp_path, ChannelPruning(amount=0.5), compaction)
    assert len(history(module.net)) == 2 and module.net.wide.out_channels == 4
    assert difference(load_compacted(compaction.checkpoint_path, Mixed), module) == 0.0


@pytest.mark.parametrize("kind", ["bits", "shape", "names", "class"])
def test_refused_before_anything_changes(tmp_path: Path, compacted: Any, kind: str) -> None:
    """A damaged file, or one of another model, is an error; the module that was to take it is as it was."""
    _, path, _ = compacted
    checkpoint, module = torch.load(path, weights_only=True), Mixed(7 if kind == "class" else 8)
    if kind == "bits":
        checkpoint["state_dict"]["net.fc.bias"][0] += 1e-6
    if kind == "shape":
        checkpoint["state_dict"]["net.fc.bias"] = torch.zeros(5)
        checkpoint = seal(checkpoint)
    if kind == "names":
        checkpoint["state_dict"]["other"] = torch.zeros(5)
        checkpoint = seal(checkpoint)
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    before, shown = copy.deepcopy(module.state_dict()), repr(module)
    with pytest.raises(CheckpointError, match=r"damaged|do not fit|names of the weights|another model"):
        trainer(tmp_path).test(module, ckpt_path=str(tmp_path / "bad.ckpt"))
    assert repr(module) == shown and all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_strict_loading(tmp_path: Path, compacted: Any) -> None:
    """With `strict_loading = False` a weight too many is passed over."""
    small, path, _ = compacted
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"]["other"] = torch.zeros(5)
    torch.save(seal(checkpoint), tmp_path / "more.ckpt")
    module = Mixed()
    module.strict_loading = False
    trainer(tmp_path).test(module, ckpt_path=str(tmp_path / "more.ckpt"), verbose=False)
    assert torch.equal(outputs(module), outputs(small))
    with pytest.warns(UserWarning, match="not in the model state dict"):  # Lightning's
        loaded = Mixed.load_from_checkpoint(tmp_path / "more.ckpt", strict=False)
    assert torch.equal(outputs(loaded), outputs(small))


def test_the_mixin_comes_first() -> None:
    """Behind the LightningModule its methods would never be called: an error that says how to write it."""
    with pytest.raises(TypeError, match=r"class Wrong\(Compactable, LightningModule\)"):
        type("Wrong", (Base, Compactable), {})


def test_into_a_plain_module(compacted: Any) -> None:
    """The inner network loads without Lightning."""
    small, path, _ = compacted
    plain: nn.Module = engine.load_compacted_state(Net(), path)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(plain.eval()(x), small.net.eval()(x))
    assert KEY in torch.load(path, weights_only=True) and not isinstance(plain, LightningModule)


def test_no_code_runs_before_the_check(tmp_path: Path) -> None:
    """Where Lightning unpickles freely (before 2.6, or by torch's own switch), the file is checked first."""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    command = [sys.executable, "-m", "tests.lightning_compress.hostile_restore", str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=env).stdout.split("\n")
    ways = ("test", "fit", "mixin", "load_from_checkpoint")
    ends = ("pickle refused True", "front refused False", "script refused False")
    assert [line for line in out if line.startswith(ways)] == [f"{way} {end}" for way in ways for end in ends]
