"""Weights in the safetensors format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import engine
from engine.compaction.history import history
from engine.errors import CheckpointError, InputError
from engine.files.checkpoint import read_checkpoint
from engine.files.portable import from_json, to_json, write_tensors
from tests.engine import golden
from tests.engine.nets import snapshot, unchanged

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(params=list(golden.NETWORKS))
def compacted(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    """A compacted network and its name."""
    model = golden.made(request.param)[0]
    return request.param, engine.load_compacted_state(model, golden.FOLDER / f"{request.param}-2.golden").eval()


def test_there_and_back(tmp_path: Path, compacted: tuple[str, nn.Module]) -> None:
    """A fresh model takes them, to the bit; other readers find the weights under their names."""
    (name, model), path = compacted, tmp_path / "small.safetensors"
    engine.save_safetensors(model, path)
    fresh, x = golden.made(name)
    assert torch.equal(engine.load_compacted_state(fresh, path).eval()(x), model(x))
    assert len(history(fresh)) == 1 and list(tmp_path.iterdir()) == [path]
    loaded = safetensors.load_file(path)
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


def test_many_indices(tmp_path: Path) -> None:
    """Long lists of what stays are packed into bits, which go through the header as well."""

    def wide() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2048), nn.ReLU(), nn.Linear(2048, 1))

    model, x = wide(), torch.ones(1, 2)
    mask = (torch.rand(2048, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    masks = {"0": {"weight": mask[:, None].expand(2048, 2), "bias": mask}}
    engine.ModelSpeedup(model, x, masks, confidence=0).speedup_model()
    engine.save_safetensors(model, tmp_path / "wide.safetensors")
    assert torch.equal(engine.load_compacted_state(wide(), tmp_path / "wide.safetensors")(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_tensors_as_text(dtype: torch.dtype) -> None:
    """What is written reads back; what could not is not written."""
    value = torch.tensor([[0, 1, 2]]).to(dtype)
    (found,) = from_json(to_json([value]))
    assert found.dtype == dtype and torch.equal(found, value)
    with pytest.raises(TypeError, match="complex64"):
        to_json(torch.ones(1, dtype=torch.complex64))


def test_tied_weights(tmp_path: Path) -> None:
    """Names that share memory are stored one by one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    engine.save_safetensors(model, tmp_path / "tied.safetensors")
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine.load_compacted_state(other, tmp_path / "tied.safetensors")
    assert torch.equal(other[1].weight, model[0].weight)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_damaged(tmp_path: Path, compacted: tuple[str, nn.Module], share: float) -> None:
    """A flipped bit in the header, in the plan or in a weight is refused, and the model is as it was."""
    (name, model), path = compacted, tmp_path / "small.safetensors"
    engine.save_safetensors(model, path)
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 1
    path.write_bytes(data)
    fresh = golden.made(name)[0]
    before = snapshot(fresh)
    with pytest.raises(CheckpointError, match=r"small\.safetensors"):
        engine.load_compacted_state(fresh, path)
    assert unchanged(fresh, before)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """Extra state that is not a tensor, another ending, and an unknown dtype are clear errors; no file is left."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> str:
            return "more"

    with pytest.raises(InputError, match="_extra_state"):
        engine.save_safetensors(Extra(1, 1), tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"must end with '\.safetensors'.*got .*x\.pt"):
        engine.save_safetensors(nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(InputError, match="complex128, such as 'weight'"):
        engine.save_safetensors(nn.Linear(1, 1, dtype=torch.complex128), tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_foreign_file(tmp_path: Path) -> None:
    """A file of others, without plans, is refused as a compacted checkpoint."""
    safetensors.save_file({"weight": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="contains no compaction plan"):
        read_checkpoint(tmp_path / "x.safetensors")


def test_what_the_package_reads(tmp_path: Path) -> None:
    """Tensors of any dtype and layout, a name and metadata beyond ASCII; aligned, and as the umask allows."""
    numbers = torch.complex(torch.rand(2), torch.rand(2)).conj()
    tensors = {
        "half": torch.rand(3).half(),
        "flag": torch.tensor(True),
        "turned": torch.rand(4, 2).t(),
        "none": torch.zeros(0, 3),
        "wide": torch.rand(3).double(),
        "größe": torch.rand(1).expand(5),
        "conjugate": numbers,
        "negative": numbers.imag,
        "small": torch.rand(3).to(torch.float8_e5m2),
    }
    path = tmp_path / "x.safetensors"
    write_tensors(tensors, path, {"format": "pt", "said": '"ü"'})
    loaded = safetensors.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype is tensor.dtype and loaded[name].tolist() == tensor.tolist()
    with pytest.importorskip("safetensors").safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "said": '"ü"'}
    data = path.read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert path.stat().st_mode & 0o777 == Path(torch_saved(tmp_path)).stat().st_mode & 0o777


def torch_saved(folder: Path) -> Path:
    """A file that torch wrote."""
    torch.save({}, folder / "x.pt")
    return folder / "x.pt"


def test_writers_in_one_folder(tmp_path: Path) -> None:
    """Nobody takes the file that another one is writing for a leftover."""

    def write(number: int) -> None:
        for _ in range(20):
            write_tensors({"a": torch.full((4,), float(number))}, tmp_path / f"{number % 2}.safetensors", {})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
