"""Compacted networks where they are to run."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

import engine
from engine.errors import InputError, VerificationError
from engine.program.trees import tensors_in
from engine.sensitivity.importance import cut
from lightning_compress.checkpoints.export import (
    another_batch,
    difference,
    export_onnx,
    export_program,
    export_torchscript,
)
from tests.engine import golden
from tests.engine.nets import Net

# The packages that fit torch 2.6 are older than those that are installed with it: not even a batch norm goes through.
ONNX = pytest.mark.skipif(torch.__version__ < "2.7", reason="onnxscript of a later time than torch")


def compacted(name: str) -> tuple[nn.Module, Tensor]:
    """A compacted network and an example."""
    model, x = golden.made(name)
    return engine.load_compacted_state(model, golden.FOLDER / f"{name}-2.golden"), x


@pytest.mark.parametrize("name", golden.NETWORKS)
@pytest.mark.parametrize("export", [export_program, export_torchscript])
def test_exported(tmp_path: Path, name: str, export: Any) -> None:
    """The file holds what the model computes, at other batch sizes too; the model's mode stays as it was."""
    (model, x), path = compacted(name), tmp_path / "made" / "model.bin"
    model.train()
    assert export(model, path, x) <= 1e-5 and model.training
    assert [p.name for p in path.parent.iterdir()] == ["model.bin"]


@ONNX
@pytest.mark.parametrize("name", golden.NETWORKS)
def test_onnx(tmp_path: Path, name: str) -> None:
    """ONNX Runtime agrees with eager, at other batch sizes too; for a convolutional net at other resolutions."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (model, x), path = compacted(name), tmp_path / "model.onnx"
    convolutional = name == "convolutional"
    assert export_onnx(model, path, x, dynamic=("batch", "size") if convolutional else ("batch",)) <= 1e-5
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    other = torch.randn(5, 2, 9, 11) if convolutional else torch.cat([x, x, x])
    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model.eval()(other).detach(), rtol=1e-5, atol=1e-5)


@ONNX
def test_a_large_file_keeps_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that go into a second file, as those of more than 2 GB do, are found beside the first."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (model, x), path, save = compacted("convolutional"), tmp_path / "model.onnx", torch.onnx.ONNXProgram.save
    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", lambda self, where: save(self, where, external_data=True))
    assert export_onnx(model, path, x) <= 1e-5
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: torch.cat([x, x]).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model.eval()(torch.cat([x, x])).detach(), rtol=1e-5, atol=1e-5)


class Fixed(nn.Module):
    """Takes one size of pictures only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.layer(x.flatten(1))


def test_a_size_that_the_model_does_not_take(tmp_path: Path) -> None:
    """Where sizes are to be dynamic and the model's are not, that is the error, and not the exporter's."""
    with pytest.raises(InputError, match=r"torch\.export cannot export the model|The model itself rejects"):
        export_program(Fixed(), tmp_path / "m.pt2", torch.ones(2, 1, 4, 4), dynamic=("batch", "size"))
    assert not list(tmp_path.iterdir())


class Detector(nn.Module):
    """Keeps a grid for the shape of its last input, as the heads of YOLO do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shape, self.grid = nn.Conv2d(3, 4, 3, padding=1), None, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return boxes: offsets from the points of the grid."""
        x = self.layer(x)
        if self.shape != x.shape:
            height, width = x.shape[2:]
            self.grid = torch.arange(height)[:, None] * 100.0 + torch.arange(width)
            self.shape = x.shape
        return x + self.grid


@ONNX
@pytest.mark.filterwarnings("ignore:The tensor attributes? self.grid w:UserWarning")  # torch's, of what is put back
@pytest.mark.parametrize("dynamic", [(), ("batch",), ("batch", "size")])
@pytest.mark.parametrize("ran_before", [True, False])
@pytest.mark.parametrize("export", [export_program, export_onnx])
def test_what_a_model_keeps_of_its_last_input(tmp_path: Path, export: Any, ran_before: bool, dynamic: Any) -> None:
    """It is no part of the file, and the model keeps what it had: numbers, not what an exporter put there."""
    if export is export_onnx:
        pytest.importorskip("onnxscript")
    model, x = Detector(), torch.rand(2, 3, 8, 8)
    if ran_before:
        model(x)
    grid = model.grid
    suffix = {export_program: "pt2", export_onnx: "onnx"}[export]
    assert export(model, tmp_path / f"m.{suffix}", x, dynamic=dynamic) <= 1e-5
    assert model.grid is grid and model.shape == ((2, 4, 8, 8) if ran_before else None)
    assert model(torch.rand(5, 3, 9, 7)).shape == (5, 4, 9, 7)


HUGGING = {
    "bert": ("BertConfig", "BertModel", {}),
    "gpt2": ("GPT2Config", "GPT2Model", {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16}),
    "llama": ("LlamaConfig", "LlamaModel", {"num_key_value_heads": 2}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("name", HUGGING)
def test_transformers(tmp_path: Path, name: str) -> None:
    """Half of all that can go goes; pinned and exchanged modules pickle, load and are exported."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config, cls, own = HUGGING[name]
    settings = {"vocab_size": 20, "use_cache": False, **(own or small if name == "gpt2" else {**small, **own})}

    def made() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, cls)(getattr(transformers, config)(**settings))
        return model.eval()

    model, x = made(), {"input_ids": torch.arange(10).view(2, 5)}
    groups = engine.dependency_groups(model, x)
    keep = {g.name: cut(torch.arange(g.size), 0.5, g.rows) for g in groups if g.reason is None}
    engine.ModelSpeedup(model, x, engine.group_masks(groups, keep), confidence=1).speedup_model()
    assert sum(p.numel() for p in model.parameters()) < 0.9 * sum(p.numel() for p in made().parameters())
    engine.save_safetensors(model, tmp_path / "m.safetensors")
    others = (pickle.loads(pickle.dumps(model)), engine.load_compacted_state(made(), tmp_path / "m.safetensors"))
    for other in others:
        assert all(map(torch.equal, tensors_in(other(**x)), tensors_in(model(**x))))
    assert export_program(model, tmp_path / "m.pt2", x) <= 1e-5


def test_other_inputs(tmp_path: Path) -> None:
    """Several arguments, keywords, and numbers beside tensors."""
    model = Net(lambda net, x, scale, bias: net.a(x) * scale + bias, a=nn.Linear(3, 2))
    x, bias = torch.randn(2, 3), torch.randn(2)
    assert another_batch({"x": x, "bias": bias})["bias"].shape == (3,)
    assert export_program(model, tmp_path / "m.pt2", (x, 2.0, torch.randn(2, 2))) <= 1e-5
    with pytest.raises(InputError, match="no tensor with a batch"):
        another_batch((1, 2))


class Shouting(nn.Module):
    """Its code cannot be exported."""

    def forward(self, x: Tensor) -> Tensor:
        """Depends on the data."""
        return (lambda y: y)(x) if bool(x.sum() > 0) else -x


@pytest.mark.parametrize(("export", "what"), [(export_program, "torch.export"), (export_torchscript, "TorchScript")])
def test_what_cannot_be_exported(tmp_path: Path, export: Any, what: str) -> None:
    """One clear error with torch's reason; no file is left."""
    with pytest.raises(InputError, match=f"{what} cannot export the model: .*"):
        export(Shouting(), tmp_path / "m.bin", torch.ones(2, 1))
    assert not list(tmp_path.iterdir())


def test_another_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exported program computes something else there is no file."""
    model, x = compacted("convolutional")
    monkeypatch.setattr(torch.jit, "load", lambda path: lambda x: model(x) * 1.001)
    with pytest.raises(VerificationError, match="differ from those of the model by"):
        export_torchscript(model, tmp_path / "m.pt", x)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", [export_onnx, export_program, export_torchscript])
@pytest.mark.parametrize("place", ["", "folder", "file/net.onnx"])
def test_where_nothing_can_be_written(tmp_path: Path, export: Any, place: str) -> None:
    """An error that names the place, before the model is exported."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    said = "is a directory, not a file" if "/" not in place else "net.onnx could not be written: .* is a file"
    with pytest.raises(InputError, match=said):
        export(nn.Identity(), tmp_path / place, torch.ones(2, 2))


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown dimension, and a missing package, are named."""
    model, x = compacted("convolutional")
    with pytest.raises(InputError, match="'batch' or 'size', got 'time'"):
        export_program(model, tmp_path / "m.pt2", x, dynamic=("time",))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"lightning-compress\[export\]"):
        export_onnx(model, tmp_path / "m.onnx", x)
    with pytest.raises(VerificationError, match="shapes"):
        difference(nn.Linear(1, 1), nn.Linear(1, 2), [torch.ones(1, 1)])


class _Whole(LightningModule):
    """Its own `forward` computes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return three numbers."""
        output: Tensor = self.layer(x)
        return output


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_of_a_lightning_module(tmp_path: Path) -> None:
    """Without a Trainer, which the compiler would ask it for; the file needs no Lightning."""
    model, x = _Whole(), torch.rand(4, 2)
    assert export_torchscript(model, tmp_path / "m.pt", x) < 1e-6
    assert torch.equal(torch.jit.load(tmp_path / "m.pt")(x), model(x)) and model.training
