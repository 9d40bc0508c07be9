"""Checkpoints in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import CheckpointError, InputError
from engine.sensitivity.importance import cut
from tests.engine.exactness import masked, relative_error, run
from tests.engine.language import Language, sentence
from tests.engine.test_mutations import LIMITS, peak, reset_peak


def on_meta(make: Any = Language) -> nn.Module:
    """A network without data."""
    with torch.device("meta"):
        return make()


class Tied(Language):
    """The words are scored by what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def sharded(model: nn.Module, folder: Path, suffix: str, count: int = 3) -> Path:
    """Write a model in several files, names that are tied once."""
    folder.mkdir()
    names = [name for name, _ in model.named_parameters()] + [
        n for n in model.state_dict() if n not in dict(model.named_parameters(remove_duplicate=False))
    ]
    files = {name: f"model-{number % count}.{suffix}" for number, name in enumerate(names)}
    for file in set(files.values()):
        content = {name: model.state_dict()[name].clone() for name in names if files[name] == file}
        if suffix == "safetensors":
            pytest.importorskip("safetensors.torch").save_file(content, folder / file)
        else:
            torch.save(content, folder / file)
    text = json.dumps({"metadata": {"total_size": 1, "kind": "a"}, "weight_map": files})
    (folder / f"model.{suffix}.index.json").write_text(text)
    return folder


WORDS = sentence().to("meta")


def half(model: nn.Module, x: Tensor) -> dict[str, dict[str, Tensor]]:
    """Mask the first half of each group, of a model with or without data."""
    groups = engine.dependency_groups(model, x)
    keep = {g.name: cut(torch.arange(g.size), 0.5, g.rows) for g in groups if g.reason is None}
    return engine.group_masks(groups, keep)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("make", [Language, Tied])
def test_compacted_shard_by_shard(tmp_path: Path, make: Any, suffix: str) -> None:
    """The small files hold what the masked model computes; into a model without data and into one with."""
    torch.manual_seed(0)
    model, small = make().double().eval(), on_meta(make).double().eval()
    masks = half(small, WORDS)
    expected = run(masked(model, masks), sentence())
    plan = engine.compact_shards(small, sharded(model, tmp_path / "in", suffix), tmp_path / "out", WORDS, masks)
    assert (
        plan.slices["embed.weight"].shape == (11, 8) and plan.slices["blocks.0.attention.q_proj.weight"].shape[0] == 8
    )
    index = json.loads((tmp_path / "out" / f"model.{suffix}.index.json").read_text())
    assert index["metadata"]["kind"] == "a" and index["metadata"]["total_size"] == 8 * sum(
        p.numel() for p in small.parameters()
    )
    assert {p.name for p in (tmp_path / "in").iterdir()} == {p.name for p in (tmp_path / "out").iterdir()}
    for target in (make().double(), on_meta(make).double()):
        for name, buffer in model.named_buffers():  # not in the files: the model's own, as ever
            owner, _, key = name.rpartition(".")
            target.get_submodule(owner).register_buffer(key, buffer.clone(), persistent=False)
        loaded = engine.load_shards(target, tmp_path / "out").eval()
        assert relative_error(expected, run(loaded, sentence())) <= 1e-9
        assert make is not Tied or loaded.head.weight is loaded.embed.weight
        assert [p.shape for p in loaded.parameters()] == [p.shape for p in small.parameters()]


class Wide(nn.Sequential):
    """Sixteen layers of a megabyte each."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(16) for layer in (nn.Linear(512, 512, bias=False), nn.ReLU())))


@pytest.mark.skipif(not LIMITS.exists(), reason="only Linux tells how much memory was taken")
def test_one_file_in_memory_at_a_time(tmp_path: Path) -> None:
    """Of sixteen megabytes in eight files no more than two files' worth is held."""
    pytest.importorskip("safetensors")
    folder, small, x = sharded(Wide(), tmp_path / "in", "safetensors", 8), on_meta(Wide), torch.zeros(1, 512)
    masks = half(small, x.to("meta"))
    engine.compact_shards(on_meta(Wide), folder, tmp_path / "warm", x.to("meta"), masks)
    reset_peak()
    before = peak()
    engine.compact_shards(small, folder, tmp_path / "out", x.to("meta"), masks)
    assert peak() - before < 6
    assert small[0].weight.shape == (256, 512)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A compacted checkpoint in three files."""
    small = on_meta()
    engine.compact_shards(
        small,
        sharded(Language(), tmp_path / "in", "bin"),
        tmp_path / "out",
        sentence(),
        half(small, WORDS),
    )
    return tmp_path / "out"


@pytest.mark.parametrize("kind", ["bits", "missing", "elsewhere", "plan", "model", "json", "none"])
def test_what_cannot_be_loaded(written: Path, kind: str) -> None:
    """Damaged files, lost ones, files outside of the folder, and another model: an error, and the model as it was."""
    index, file = written / "model.bin.index.json", written / "model-1.bin"
    content, target = json.loads(index.read_text()), Language(neurons=10 if kind == "model" else 12)
    if kind == "bits":
        weights = torch.load(file, weights_only=True)
        next(iter(weights.values())).flatten()[0] += 1e-6
        torch.save(weights, file)
    elif kind == "missing":
        file.unlink()
    elif kind == "elsewhere":
        content["weight_map"] = {name: f"../out/{place}" for name, place in content["weight_map"].items()}
    elif kind == "plan":
        content["metadata"]["lightning_compress"]["compacted"][""]["plans"][0]["notes"] = ["another"]
    elif kind == "none":
        del content["metadata"]["lightning_compress"]
    index.write_text(json.dumps(content)[: 50 if kind == "json" else None])
    before, shown = {n: t.clone() for n, t in target.state_dict().items()}, repr(target)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        engine.load_shards(target, written)
    assert repr(target) == shown and all(torch.equal(t, before[n]) for n, t in target.state_dict().items())


def test_what_cannot_be_compacted(tmp_path: Path, written: Path) -> None:
    """A model with data, a folder in use, no masks, other names, no index: an error that says so."""
    folder, masks = tmp_path / "in", half(on_meta(), WORDS)
    with pytest.raises(InputError, match=r"'embed\.weight' holds data"):
        engine.compact_shards(Language(), folder, tmp_path / "new", WORDS, masks)
    with pytest.raises(InputError, match="already contains a checkpoint"):
        engine.compact_shards(on_meta(), folder, written, WORDS, masks)
    with pytest.raises(InputError, match="No masked channels"):
        engine.compact_shards(on_meta(), folder, tmp_path / "new", WORDS, {})
    with pytest.raises(CheckpointError, match=r"has no 'blocks\.1"):
        engine.compact_shards(on_meta(lambda: Language(depth=1)), folder, tmp_path / "new", WORDS, masks)
    with pytest.raises(CheckpointError, match=r"'blocks\.2.*is in none of its files"):
        engine.compact_shards(on_meta(lambda: Language(depth=3)), folder, tmp_path / "new", WORDS, masks)
    with pytest.raises(CheckpointError, match="contains 0 indices"):
        engine.compact_shards(on_meta(), tmp_path, tmp_path / "new", WORDS, masks)
    assert not (tmp_path / "new").exists()
