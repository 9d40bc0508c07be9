"""Loading a compacted checkpoint into a plain module."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import CheckpointError
from engine.files.checkpoint import KEY, VERSION, content_of, is_compacted_file, read_checkpoint, seal
from tests.engine import golden
from tests.engine.exactness import channel_masks, randomised, run


def network() -> nn.Sequential:
    """A small network with a norm and a grouped layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Conv2d(8, 4, 1)
    )


class Wrapped(nn.Module):
    """A network in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output."""
        found: Tensor = self.net(x)
        return found


def compacted(model: nn.Module) -> engine.Plan:
    """Compact a model in place and return the plan."""
    x = torch.randn(2, 3, 8, 8).double()
    speedup = engine.ModelSpeedup(model, x, engine.fix_mask_conflict(channel_masks(model, 1), model, x))
    speedup.speedup_model()
    return speedup.plan


@pytest.mark.parametrize("target", ["", "net"])
def test_a_plain_module_takes_the_small_weights(tmp_path: Path, target: str) -> None:
    """The inner network of a wrapper loads from the wrapper's checkpoint, whichever of the two was compacted."""
    wrapper = randomised(Wrapped())
    plan = compacted(wrapper.net if target else wrapper)
    path = tmp_path / "small.ckpt"
    torch.save(seal({"state_dict": wrapper.state_dict(), KEY: content_of(wrapper)}), path)
    assert list(content_of(wrapper)["compacted"]) == [target] and not plan.is_empty
    plain = engine.load_compacted_state(network().double(), path)
    x = torch.randn(2, 3, 8, 8).double()
    assert torch.equal(run(plain, x)[0], run(wrapper, x)[0])
    assert plain[3].groups == wrapper.net[3].groups


class Versioned(nn.Conv2d):
    """Reads what its older versions saved, as batch norms and MNASNet do."""

    _version = 3

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        version = local_metadata.get("version")
        if version not in (2, 3):
            raise ValueError(f"version should be 2 or 3 instead of {version}")
        if version == 2:
            state_dict[f"{prefix}bias"] = -state_dict[f"{prefix}bias"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Stack(nn.Sequential):
    """The same of a model as a whole."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors", "older"])
def test_versions_of_modules(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules learn which version of theirs saved the weights, in whatever part of a model they are."""
    model = randomised(Stack(nn.Sequential(Versioned(3, 8, 1)), nn.Conv2d(8, 2, 1)))
    x = torch.randn(2, 3, 4, 4).double()
    mask = (torch.arange(8) > 3).double()
    masks = {"0.0": {"weight": mask.view(8, 1, 1, 1).expand(8, 3, 1, 1), "bias": mask}}
    engine.ModelSpeedup(model, x, masks).speedup_model()
    expected, path = run(model, x)[0], tmp_path / "small.ckpt"
    if kind == "older":
        monkeypatch.setattr(Versioned, "_version", 2)
        with torch.no_grad():
            model[0][0].bias.neg_()
    content = {"state_dict": nn.ModuleDict({"net": model}).state_dict(), KEY: content_of(nn.ModuleDict({"net": model}))}
    torch.save(seal(content), path)
    if kind == "safetensors":
        pytest.importorskip("safetensors")
        path = tmp_path / "small.safetensors"
        engine.save_safetensors(model, path)
    monkeypatch.setattr(Versioned, "_version", 3)
    fresh = Stack(nn.Sequential(Versioned(3, 8, 1)), nn.Conv2d(8, 2, 1)).double()
    assert torch.equal(run(engine.load_compacted_state(fresh, path), x)[0], expected)


def test_a_version_that_was_changed(tmp_path: Path) -> None:
    """The versions are part of what the digests hold."""
    wrapper = randomised(Wrapped())
    compacted(wrapper)
    sealed = seal({"state_dict": wrapper.state_dict(), KEY: content_of(wrapper)})
    sealed["state_dict"]._metadata["net.1"]["version"] = 1
    torch.save(sealed, tmp_path / "small.ckpt")
    with pytest.raises(CheckpointError, match="'versions' was modified"):
        engine.load_compacted_state(Wrapped(), tmp_path / "small.ckpt")


def test_a_checkpoint_of_what_was_not_compacted(tmp_path: Path) -> None:
    """Without a plan the weights are loaded as they are."""
    model = randomised(network())
    torch.save({"state_dict": model.state_dict(), KEY: content_of(model)}, tmp_path / "a.ckpt")
    loaded = engine.load_compacted_state(network().double(), tmp_path / "a.ckpt")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in loaded.state_dict().items())


def damaged(kind: str) -> dict[str, Any]:
    """Return a checkpoint with a fault."""
    model = randomised(network())
    compacted(model)
    good = seal({"state_dict": model.state_dict(), KEY: content_of(model)})
    if kind == "newer":
        good[KEY]["version"] = VERSION + 1
    if kind == "no plan":
        good = {"state_dict": dict(good["state_dict"])}
    if kind == "no weights":
        del good["state_dict"]
    if kind == "a key less":
        del good[KEY]["compacted"]
    if kind == "no digests":
        del good[KEY]["sha256"]
    if kind == "another model":
        good = seal({**good, "state_dict": nn.Linear(2, 2).state_dict()})
    if kind == "wrong shape":
        good = seal({**good, "state_dict": {**good["state_dict"], "4.bias": torch.zeros(9)}})
    if kind == "another weight":
        good["state_dict"]["4.bias"] = good["state_dict"]["4.bias"] + 1
    if kind == "index out of range":
        next(iter(good[KEY]["compacted"][""]["plans"][0]["slices"].values()))["cuts"][0]["index"][0] = 99
        good = seal(good)
    if kind == "infinite number":
        good[KEY]["compacted"][""]["plans"][0]["attributes"] = {"0": {"out_channels": float("inf")}}
        good = seal(good)
    return good


FAULTS = [
    "newer",
    "no plan",
    "no weights",
    "a key less",
    "no digests",
    "another model",
    "wrong shape",
    "another weight",
    "index out of range",
    "infinite number",
]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    """The error names the file, and the model is bit for bit as it was."""
    path = tmp_path / "bad.ckpt"
    torch.save(damaged(kind), path)
    model = randomised(network(), seed=5)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"bad\.ckpt"):
        engine.load_compacted_state(model, path)
    assert repr(model) == repr(network())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("metadata", [{"": 3}, {"": [1]}, {0: {}}, [1]], ids=str)
def test_metadata_that_torch_does_not_write(tmp_path: Path, metadata: Any) -> None:
    """Refused by all readers, and by what loads."""
    good, path = damaged("none"), tmp_path / "bad.ckpt"
    good["state_dict"] = OrderedDict(good["state_dict"])
    good["state_dict"]._metadata = metadata
    good[KEY]["sha256"] = None
    torch.save(good, path)
    model = randomised(network(), seed=5)
    with pytest.raises(CheckpointError, match=r"bad\.ckpt"):
        engine.load_compacted_state(model, path)
    assert repr(model) == repr(network())
    with pytest.raises(CheckpointError, match=r"bad\.ckpt"):
        is_compacted_file(path)


def test_weights_under_ten_thousand_names(tmp_path: Path) -> None:
    """Whose ends are all that of a weight: which of them are the model's is looked up, not tried one by one."""
    good, path, tied = damaged("none"), tmp_path / "many.ckpt", torch.zeros(1)
    names = (f"p{number}.{name}" for number in range(5000) for name in ("0.bias", "0.weight"))
    good["state_dict"] = {**dict.fromkeys(names, tied), **good["state_dict"]}
    torch.save(seal(good), path)
    begin = time.process_time()
    with contextlib.suppress(CheckpointError):
        engine.load_compacted_state(network(), path)
    assert time.process_time() - begin < 5


def test_a_saved_state_dict(tmp_path: Path) -> None:
    """What ``torch.save(model.state_dict(), path)`` writes is enough; of a model that lost nothing it says so."""
    model, x = golden.made("convolutional")
    engine.load_compacted_state(model, golden.FOLDER / "convolutional-2.golden").eval()
    torch.save(model.state_dict(), tmp_path / "small.pt")
    loaded = engine.load_compacted_state(golden.made("convolutional")[0], tmp_path / "small.pt").eval()
    assert torch.equal(loaded(x), model(x))
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match="no compaction plan.*state dict of a plain model"):
        engine.load_compacted_state(nn.Linear(1, 1), tmp_path / "plain.pt")


def test_a_truncated_or_missing_file(tmp_path: Path) -> None:
    """Each is one clear error."""
    path = tmp_path / "cut.ckpt"
    torch.save(damaged("none"), path)
    path.write_bytes(path.read_bytes()[:200])
    for name in ("cut.ckpt", "none.ckpt"):
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", golden.NETWORKS)
def test_files_of_every_version_load(name: str, version: int) -> None:
    """A file that the code of its time wrote loads, and the network puts out what it put out then."""
    path = golden.FOLDER / f"{name}-{version}.golden"
    model, x = golden.made(name)
    dense = sum(p.numel() for p in model.parameters())
    loaded = engine.load_compacted_state(model, path).eval()
    assert read_checkpoint(path)[KEY]["version"] == version
    assert sum(p.numel() for p in loaded.parameters()) < dense
    torch.testing.assert_close(loaded(x), read_checkpoint(path)["expected"])


def test_the_present_version_has_golden_files() -> None:
    """Whoever changes the format adds files of the new version, and the old ones stay."""
    found = {path.name for path in golden.FOLDER.iterdir()}
    assert found == {f"{name}-{v}.golden" for name in golden.NETWORKS for v in range(1, VERSION + 1)}
