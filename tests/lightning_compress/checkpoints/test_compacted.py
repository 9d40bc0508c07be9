"""Tests of the compacted checkpoint."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from engine.compaction.digest import digest
from engine.errors import CheckpointError
from engine.files.checkpoint import read_checkpoint, seal
from lightning_compress import ChannelPruning, ModelCompaction, load_compacted
from lightning_compress.checkpoints import compacted as files
from tests.lightning_compress.models import Base, Net, Reference, Root, Wrapped, difference, fit, seeded

ROOT = Path(__file__).parents[3]


class Compacted:
    """A compacted module and its checkpoint."""

    def __init__(self, folder: Path, cls: type[Base]) -> None:
        compaction = ModelCompaction(on_failure="raise")
        self.module = seeded(cls)
        fit(self.module, folder, Reference(), ChannelPruning(amount=0.5), compaction)
        assert compaction.checkpoint_path is not None
        self.path = Path(compaction.checkpoint_path)


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Compacted:
    """One compacted fit."""
    return Compacted(tmp_path_factory.mktemp("fit"), Wrapped)


def edited(compacted: Compacted, folder: Path, **changes: Any) -> Path:
    """The checkpoint with changed entries of the plan's key."""
    checkpoint = torch.load(compacted.path, weights_only=True)
    checkpoint["lightning_compress"].update(changes)
    torch.save(checkpoint, folder / "edited.ckpt")
    return folder / "edited.ckpt"


@pytest.mark.parametrize("cls", [Wrapped, Root])
def test_loads_bit_equal(tmp_path: Path, cls: type[Base]) -> None:
    """The loaded module puts out the very bits of the one in memory, with the same number of parameters."""
    compacted = Compacted(tmp_path, cls)
    loaded = load_compacted(compacted.path, cls)
    assert type(loaded) is cls
    assert difference(loaded, compacted.module) == 0.0
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in compacted.module.parameters())


def test_loads_in_a_fresh_process(tmp_path: Path, compacted: Compacted) -> None:
    """Another process loads it from the file alone and gets the same bits."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from lightning_compress import load_compacted\n"
        "from tests.lightning_compress.models import Wrapped\n"
        f"module = load_compacted({str(compacted.path)!r}, Wrapped).eval()\n"
        "x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))\n"
        f"torch.save(module.logits(x).detach(), {str(tmp_path / 'out.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True), compacted.module.eval().logits(x))


def test_holds_primitives_and_tensors_only(compacted: Compacted) -> None:
    """It is a Lightning checkpoint that reads with weights_only=True, with plan and certificate under one key."""
    checkpoint = torch.load(compacted.path, weights_only=True)
    assert {"state_dict", "pytorch-lightning_version", "hyper_parameters"} <= checkpoint.keys()
    assert checkpoint["lightning_compress"].keys() == {"version", "compacted", "sha256"}
    assert checkpoint["lightning_compress"]["version"] == 3
    assert checkpoint["lightning_compress"]["compacted"].keys() == {"net"}
    assert checkpoint["lightning_compress"]["sha256"].keys() == (checkpoint.keys() - {"lightning_compress"}) | {
        "compacted",
        "versions",
    }


def test_init_arguments_and_map_location(compacted: Compacted) -> None:
    """Arguments given replace the saved ones, so a wrong width does not fit; map_location is a device."""
    assert load_compacted(compacted.path, Wrapped, map_location="cpu").device.type == "cpu"
    with pytest.raises(CheckpointError, match="does not fit `Wrapped`.*other arguments"):
        load_compacted(compacted.path, Wrapped, width=6)


class BuiltInSetup(Wrapped):
    """Builds its network when a Trainer starts, and not before."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        """Build it."""
        self.net = Wrapped().net


def test_layers_built_in_setup(compacted: Compacted) -> None:
    """The error names the hook that does not run, and the one that does."""
    with pytest.raises(CheckpointError, match="`BuiltInSetup.setup` does not run .*`configure_model`, which runs"):
        load_compacted(compacted.path, BuiltInSetup)


def test_strict_and_not(tmp_path: Path, compacted: Compacted) -> None:
    """A weight too many is an error that names it, unless strict=False."""
    checkpoint = torch.load(compacted.path, weights_only=True)
    checkpoint["state_dict"]["extra"] = torch.ones(1)
    torch.save(seal(checkpoint), tmp_path / "extra.ckpt")
    with pytest.raises(CheckpointError, match="extra"):
        load_compacted(tmp_path / "extra.ckpt", Wrapped)
    assert difference(load_compacted(tmp_path / "extra.ckpt", Wrapped, strict=False), compacted.module) == 0.0

    class Lenient(Wrapped):
        def __init__(self, width: int = 8) -> None:
            super().__init__(width)
            self.strict_loading = False

    assert difference(load_compacted(tmp_path / "extra.ckpt", Lenient), compacted.module) == 0.0
    with pytest.raises(CheckpointError):
        load_compacted(tmp_path / "extra.ckpt", Lenient, strict=True)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, compacted: Compacted, share: float) -> None:
    """A file that is cut off anywhere is an error that names it."""
    content = compacted.path.read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.ckpt cannot be read: it is truncated"):
        load_compacted(tmp_path / "cut.ckpt", Wrapped)


def test_likely_slips_are_named(compacted: Compacted) -> None:
    """Arguments in the other order, no path, an instance, and a class that is no LightningModule."""
    cases: list[tuple[Any, Any, str]] = [
        (Wrapped, "a.ckpt", r"The path comes first: `load_compacted\(path, Wrapped\)`"),
        (None, Wrapped, "checkpoint_path` is None .* nothing was masked"),
        ("a.ckpt", Wrapped(), "takes the class .* got a Wrapped"),
        ("a.ckpt", torch.nn.Linear, r"got the class Linear\. For a plain model, .*load_compacted_state"),
    ]
    for path, cls, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_compacted(path, cls)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A path without a file is an error that names it."""
    with pytest.raises(CheckpointError, match=r"no checkpoint .*gone\.ckpt"):
        load_compacted(tmp_path / "gone.ckpt", Wrapped)


class Evil:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def test_code_in_the_file_does_not_run(
    tmp_path: Path, compacted: Compacted, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pickle that would run code is refused, and the code does not run."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_compacted(edited(compacted, tmp_path, certificate=Evil()), Wrapped)
    assert "code ran" not in capsys.readouterr().out


def test_newer_format_is_refused(tmp_path: Path, compacted: Compacted) -> None:
    """A newer format is an error that says both numbers and what to do."""
    with pytest.raises(CheckpointError, match="format 4 is newer than format 3.*Install a newer version"):
        load_compacted(edited(compacted, tmp_path, version=4), Wrapped)


def test_plain_checkpoint_is_refused(tmp_path: Path) -> None:
    """A checkpoint without a plan is an error that says how to load it."""
    fit(seeded(Wrapped), tmp_path, max_epochs=1).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(
        CheckpointError, match=r"plain\.ckpt cannot be used. It contains no compaction plan.*load_from_checkpoint"
    ):
        load_compacted(tmp_path / "plain.ckpt", Wrapped)
    torch.save({"weights": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="neither a Lightning checkpoint"):
        load_compacted(tmp_path / "other.pt", Wrapped)


def test_lost_key_is_named(tmp_path: Path, compacted: Compacted) -> None:
    """A plan that lacks a part is an error that names the part."""
    checkpoint = torch.load(compacted.path, weights_only=True)
    del checkpoint["lightning_compress"]["compacted"]
    torch.save(checkpoint, tmp_path / "lost.ckpt")
    with pytest.raises(CheckpointError, match="incomplete .*compacted"):
        load_compacted(tmp_path / "lost.ckpt", Wrapped)


def test_another_models_checkpoint_is_refused(tmp_path: Path, compacted: Compacted) -> None:
    """A checkpoint of another class is an error that names file and class."""

    class Other(Base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

    with pytest.raises(CheckpointError, match=r"compacted\.ckpt does not fit `Other`: it belongs to another model"):
        load_compacted(compacted.path, Other)
    with pytest.raises(CheckpointError, match="does not fit `Wrapped`"):
        load_compacted(Compacted(tmp_path, Root).path, Wrapped)


class Given(Base):
    """Gets its network as an argument, and saves it as a hyper-parameter, as many do."""

    def __init__(self, net: nn.Module, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the model."""
        return self.net(x)


@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`")  # Lightning's advice, taken here
def test_hyper_parameters_that_are_no_values(tmp_path: Path) -> None:
    """A network among the hyper-parameters is left out with a warning, and has to be given when loading."""
    module, compaction = seeded(Given, net=seeded(Net), rate=0.2), ModelCompaction(on_failure="raise")
    with pytest.warns(UserWarning, match="hyperparameters 'net' are not plain values"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), compaction)
    loaded = load_compacted(compaction.checkpoint_path, Given, net=Net())
    assert loaded.hparams["rate"] == 0.2
    assert difference(loaded, module) == 0.0
    with pytest.raises(CheckpointError, match="`Given` cannot be built.*'net'"):
        load_compacted(compaction.checkpoint_path, Given)


class Configured(Base):
    """Takes one dictionary of settings, and builds its network late."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.net: Net | None = None

    def configure_model(self) -> None:
        """Build the network."""
        self.net = self.net or Net(self.hparams.width)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the model."""
        return self.net(x)


def test_settings_in_one_argument_and_late_networks(tmp_path: Path) -> None:
    """Hyper-parameters saved from one dictionary come back as that argument; `configure_model` builds the network."""
    module, compaction = Configured({"width": 8}), ModelCompaction(on_failure="raise")
    fit(module, tmp_path, ChannelPruning(amount=0.5), compaction)
    assert difference(load_compacted(compaction.checkpoint_path, Configured), module) == 0.0


def test_writing_is_atomic(tmp_path: Path, compacted: Compacted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writing fails half-way, or does not read back, the old file stays and no temporary file is left."""
    path = tmp_path / "c.ckpt"
    path.write_bytes(b"old")
    content = read_checkpoint(compacted.path)

    def torn(value: Any, file: Any) -> None:
        file.write(b"half")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(CheckpointError, match="could not be read back .* cannot be read"):
        files.write(content, path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_failed_rename_keeps_the_old_file(
    tmp_path: Path, compacted: Compacted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new content comes by a rename: where that fails, the old file is whole."""
    path = tmp_path / "c.ckpt"
    path.write_bytes(b"old")

    def fail(source: Any, target: Any) -> None:
        raise OSError("no rename")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match="no rename.*Existing files are unchanged"):
        files.write(read_checkpoint(compacted.path), path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_wrong_bits_are_found(tmp_path: Path, compacted: Compacted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads back with another weight than was written is an error, and the file is not there."""
    content = read_checkpoint(compacted.path)
    save = torch.save

    def flipped(value: Any, file: Any) -> None:
        save(
            {**value, "state_dict": {k: v * 2 if k == "net.fc.bias" else v for k, v in value["state_dict"].items()}},
            file,
        )

    monkeypatch.setattr(torch, "save", flipped)
    with pytest.raises(CheckpointError, match=r"c\.ckpt could not be read back.*'state_dict'"):
        files.write(content, tmp_path / "c.ckpt")
    assert not list(tmp_path.iterdir())


def test_writing_replaces_and_makes_folders(tmp_path: Path, compacted: Compacted) -> None:
    """The folder is made where it is missing, an old file is replaced, and what is read is what was written."""
    path = tmp_path / "a" / "b" / "c.ckpt"
    content = read_checkpoint(compacted.path)
    for _ in range(2):
        files.write(content, path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(read_checkpoint(path)["state_dict"].values(), content["state_dict"].values(), strict=True)
    )


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_folder_that_became_a_file_is_a_failure(tmp_path: Path, kind: str) -> None:
    """No other name is tried: the error names the folder and comes to an end."""
    folder = tmp_path / "folder"

    class Break(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            folder.rmdir()
            folder.touch() if kind == "file" else folder.symlink_to(tmp_path / "missing")

    compaction = ModelCompaction(folder, on_failure="raise")
    with pytest.raises(CheckpointError, match="folder is a file or a link to nothing"):
        fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), compaction, Break())
    assert compaction.checkpoint_path is None and compaction.plan is not None


def test_nan_weights_are_written(tmp_path: Path, compacted: Compacted) -> None:
    """A weight that is NaN equals itself: the comparison after writing is of bits, not of numbers."""
    content = read_checkpoint(compacted.path)
    content["state_dict"]["net.fc.bias"] = torch.full((3,), torch.nan)
    files.write(content, tmp_path / "nan.ckpt")
    assert read_checkpoint(tmp_path / "nan.ckpt")["state_dict"]["net.fc.bias"].isnan().all()


def test_loaded_module_is_a_plain_lightning_module(compacted: Compacted) -> None:
    """Nothing of the loading stays on the module: no hooks, the class it was asked for."""
    loaded = load_compacted(compacted.path, Wrapped)
    assert isinstance(loaded, LightningModule) and not loaded._load_state_dict_pre_hooks


def killed_while_writing(path: Path, contents: list[dict[str, Any]], tries: int) -> set[int]:
    """Let a process write one content after the other over a file, kill it at any moment, and look at the file.

    Returns:
        Which of the contents were found.
    """
    rng, found = random.Random(0), set()
    files.write(contents[0], path)
    for _ in range(tries):
        child = os.fork()
        if child == 0:
            for number in itertools.count(1):
                files.write(contents[number % len(contents)], path)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        whole = read_checkpoint(path)
        (number,) = (i for i, c in enumerate(contents) if whole["epoch"] == c["epoch"])
        assert digest(whole["state_dict"]) == digest(contents[number]["state_dict"])
        found.add(number)
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")  # the child only writes files
@pytest.mark.parametrize("tries", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_writing(tmp_path: Path, compacted: Compacted, tries: int) -> None:
    """SIGKILL at any moment leaves the old file or the new one, whole, and does not disturb a later write."""
    content = read_checkpoint(compacted.path)
    filler = {"filler": torch.zeros(200_000)}  # so that writing takes a while
    contents = [{**content, "epoch": n, "state_dict": {**content["state_dict"], **filler}} for n in (0, 1, 2)]
    found = killed_while_writing(tmp_path / "c.ckpt", contents, tries)
    assert tries < 50 or len(found) == len(contents)
    files.write(contents[1], tmp_path / "c.ckpt")
    assert read_checkpoint(tmp_path / "c.ckpt")["epoch"] == 1


@pytest.mark.parametrize("width", [8, 64])
def test_size(tmp_path: Path, width: int) -> None:
    """A compacted checkpoint is at most 1 % + 256 KiB larger than a plain one of the same content."""
    module, compaction = seeded(Wrapped, width=width), ModelCompaction(on_failure="raise")
    trainer = fit(module, tmp_path, ChannelPruning(amount=0.5), compaction, max_epochs=2)
    plain = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    torch.save({**plain, "state_dict": dict(plain["state_dict"])}, tmp_path / "plain.ckpt")
    small, large = ((tmp_path / name).stat().st_size for name in ("plain.ckpt", "compacted.ckpt"))
    assert large <= 1.01 * small + 256 * 1024


class Scaler:
    """What a package keeps beside the weights: an object that no allowlist knows."""


class Encoded(Wrapped):
    """Puts objects into its checkpoint, some of them under keys that its own loading asks for."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put them there."""
        checkpoint["dataset_parameters"] = {"scaler": Scaler(), "length": 24, "nested": {"more": Scaler(), "name": "a"}}
        checkpoint["special"] = {"loss": Scaler()}
        checkpoint["version"] = Scaler()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Ask for a key of which nothing is left."""
        self.dataset_parameters = checkpoint["dataset_parameters"]
        self.specials = dict(checkpoint["special"])


def test_objects_that_a_hook_puts_there(tmp_path: Path) -> None:
    """They are left out one by one, with a warning that names key and type; what is plain stays where it was."""
    module, compaction = seeded(Encoded), ModelCompaction()
    with pytest.warns(UserWarning, match=r"dataset_parameters\.scaler \(Scaler\).*nested\.more.*version \(Scaler\)"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), compaction)
    assert compaction.failure is None and compaction.checkpoint_path is not None
    loaded = load_compacted(compaction.checkpoint_path, Encoded)
    assert loaded.dataset_parameters == {"length": 24, "nested": {"name": "a"}} and loaded.specials == {}
    assert difference(loaded, module) == 0.0


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_checkpoint_that_is_not_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    """The callback says so as it says that a model is not compacted; one of path and failure is set."""

    def refuse(checkpoint: Any, path: Path) -> None:
        raise CheckpointError("No room.")

    monkeypatch.setattr(files, "write_new", refuse)
    compaction = ModelCompaction(on_failure=on_failure)
    if on_failure == "raise":
        with pytest.raises(CheckpointError, match=r"could not be written\. No room"):
            fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), compaction)
    else:
        with pytest.warns(UserWarning, match=r"could not be written\. No room"):
            fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), compaction)
    assert compaction.checkpoint_path is None and "No room" in str(compaction.failure)
