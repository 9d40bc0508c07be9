"""Compaction of checkpoints that lie on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import prune

from engine.errors import CheckpointError, InputError
from engine.files.checkpoint import read_checkpoint
from lightning_compress import ChannelPruning, compact_checkpoint, load_compacted
from lightning_compress.trainer.target import find_model
from tests.lightning_compress.models import Base, Reference, Root, Wrapped, difference, fit, seeded

ROOT = Path(__file__).parents[3]
SHAPE = (2, 3, 8, 8)


def masked(folder: Path, cls: type[Base] = Wrapped) -> tuple[Base, Path]:
    """A masked module and its checkpoint."""
    module = seeded(cls)
    fit(module, folder, Reference(), ChannelPruning(amount=0.5)).save_checkpoint(folder / "masked.ckpt")
    return module, folder / "masked.ckpt"


@pytest.mark.parametrize("cls", [Wrapped, Root])
def test_a_masked_checkpoint(tmp_path: Path, cls: type[Base]) -> None:
    """The small module computes what the masked one does, and loads from the file to the same bits."""
    module, path = masked(tmp_path, cls)
    small = compact_checkpoint(path, cls, tmp_path / "small.ckpt", SHAPE)
    assert find_model(small)[1].get_submodule("features" if cls is Root else "").wide.out_channels == 8
    assert difference(module, small) <= 1e-5
    assert difference(load_compacted(tmp_path / "small.ckpt", cls), small) == 0.0
    content = read_checkpoint(tmp_path / "small.ckpt")
    assert "optimizer_states" not in content and content["epoch"] == 3


def test_in_place_and_again(tmp_path: Path) -> None:
    """`path_out` may be `path_in`; a compacted checkpoint of which more is zero is compacted again."""
    module, path = masked(tmp_path)
    compact_checkpoint(path, Wrapped, path, SHAPE)
    small = load_compacted(path, Wrapped)
    small.net.wide.weight.data[:3], small.net.wide.bias.data[:3] = 0, 0
    small.net.wide_norm.weight.data[:3], small.net.wide_norm.bias.data[:3] = 0, 0
    checkpoint = {**torch.load(path, weights_only=True), "state_dict": small.state_dict()}
    del checkpoint["lightning_compress"]  # Lightning would not write it either; the weights tell
    torch.save(checkpoint, tmp_path / "again.ckpt")
    again = compact_checkpoint(tmp_path / "again.ckpt", Wrapped, tmp_path / "smaller.ckpt", SHAPE)
    assert again.net.wide.out_channels == 5
    assert difference(load_compacted(tmp_path / "smaller.ckpt", Wrapped), small) <= 1e-5


def test_pruned_by_torch(tmp_path: Path) -> None:
    """Originals and masks of `torch.nn.utils.prune`, as ModelPruning stores them, become zeros, and go."""
    module = seeded(Wrapped)
    runner = fit(module, tmp_path, max_epochs=1)
    prune.ln_structured(module.net.wide, "weight", 0.5, n=1, dim=0)
    dead = module.net.wide.weight_mask.amax((1, 2, 3)) == 0
    for layer, name in ((module.net.wide, "bias"), (module.net.wide_norm, "weight"), (module.net.wide_norm, "bias")):
        prune.custom_from_mask(layer, name, ~dead)
    runner.save_checkpoint(tmp_path / "pruned.ckpt")
    small = compact_checkpoint(tmp_path / "pruned.ckpt", Wrapped, tmp_path / "small.ckpt", SHAPE)
    assert small.net.wide.out_channels == 8 and difference(module, small) <= 1e-5


def test_masks_of_the_user(tmp_path: Path) -> None:
    """Masks given with the call apply to an unpruned checkpoint."""
    module = seeded(Wrapped)
    fit(module, tmp_path, max_epochs=1).save_checkpoint(tmp_path / "dense.ckpt")
    keep = (torch.arange(16) % 4 != 0).float()
    layers = {name: dict(getattr(module.net, name).named_parameters()) for name in ("wide", "wide_norm")}
    masks = {
        name: {key: keep.view(-1, *[1] * (p.ndim - 1)).expand(p.shape).clone() for key, p in own.items()}
        for name, own in layers.items()
    }
    small = compact_checkpoint(tmp_path / "dense.ckpt", Wrapped, tmp_path / "small.ckpt", SHAPE, masks=masks)
    assert small.net.wide.out_channels == 12


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by torch itself, in older versions
@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_sharded_checkpoint(tmp_path: Path, key: str) -> None:
    """The folder in which FSDP (`model`) or `ModelParallelStrategy` (`state_dict`) saves shards is compacted too."""
    module, path = masked(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    folder = tmp_path / "sharded.ckpt"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({key: checkpoint.pop("state_dict")}, checkpoint_id=folder)
    torch.save(checkpoint, folder / "meta.pt")
    small = compact_checkpoint(folder, Wrapped, tmp_path / "small.ckpt", SHAPE)
    assert difference(module, small) <= 1e-5 and small.net.wide.out_channels == 8
    with pytest.raises(CheckpointError, match="not a folder of a sharded checkpoint"):
        compact_checkpoint(tmp_path, Wrapped, tmp_path / "small.ckpt", SHAPE)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_folder_of_something_else(tmp_path: Path) -> None:
    """The error says what the folder holds."""
    folder = tmp_path / "sharded.ckpt"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"net": {"weight": torch.ones(2)}}, checkpoint_id=folder)
    torch.save({}, folder / "meta.pt")
    with pytest.raises(CheckpointError, match=r"holds no weights .*'net'"):
        compact_checkpoint(folder, Wrapped, tmp_path / "small.ckpt", SHAPE)


@pytest.mark.slow
def test_trained_under_fsdp(tmp_path: Path) -> None:
    """A network whose parameters were sharded over two processes while it was trained and masked."""
    script, environment = Path(__file__).parents[1] / "fsdp_fit.py", {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, check=True, timeout=300)
    small = compact_checkpoint(tmp_path / "sharded.ckpt", Wrapped, tmp_path / "small.ckpt", SHAPE)
    assert small.net.wide.out_channels == 8
    assert difference(load_compacted(tmp_path / "small.ckpt", Wrapped), small) == 0.0


class Given(Wrapped):
    """Has an example input of its own."""

    example_input_array = torch.ones(SHAPE)


@pytest.mark.parametrize(
    ("cls", "arguments", "error", "message"),
    [
        (Wrapped, {}, InputError, "no example input"),
        (Wrapped, {"example_input": SHAPE, "width": 6}, CheckpointError, r"masked\.ckpt does not fit `Wrapped`"),
        (Root, {"example_input": SHAPE}, CheckpointError, r"masked\.ckpt does not fit `Root`"),
    ],
)
def test_what_cannot_be_compacted(tmp_path: Path, cls: Any, arguments: Any, error: Any, message: str) -> None:
    """Each is one clear error, and nothing is written."""
    _, path = masked(tmp_path)
    with pytest.raises(error, match=message):
        compact_checkpoint(path, cls, tmp_path / "small.ckpt", **arguments)
    assert not (tmp_path / "small.ckpt").exists()


def test_nothing_to_remove(tmp_path: Path) -> None:
    """A dense checkpoint is an error that says so, and nothing is written."""
    fit(seeded(Given), tmp_path, max_epochs=1).save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(CheckpointError, match="Nothing in .*dense.ckpt can be removed"):
        compact_checkpoint(tmp_path / "dense.ckpt", Given, tmp_path / "small.ckpt")
    _, path = masked(tmp_path)
    compact_checkpoint(path, Wrapped, tmp_path / "once.ckpt", SHAPE)
    with pytest.raises(CheckpointError, match="once.ckpt can be removed: .*It is compacted: `load_compacted` loads it"):
        compact_checkpoint(tmp_path / "once.ckpt", Given, tmp_path / "small.ckpt")
    torch.save({"weights": nn.Linear(1, 1).state_dict()}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a Lightning checkpoint"):
        compact_checkpoint(tmp_path / "other.pt", Given, tmp_path / "small.ckpt")
    assert not (tmp_path / "small.ckpt").exists()
