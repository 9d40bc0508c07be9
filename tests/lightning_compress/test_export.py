"""Compacted networks where they are to run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import InputError, VerificationError
from lightning_compress.export import (
    another_batch,
    difference,
    export_onnx,
    export_program,
    export_torchscript,
)
from tests.engine import golden
from tests.engine.nets import Net


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
    with pytest.raises(InputError, match=f"{what} does not take the model: .*"):
        export(Shouting(), tmp_path / "m.bin", torch.ones(2, 1))
    assert not list(tmp_path.iterdir())


def test_another_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exported program computes something else there is no file."""
    model, x = compacted("convolutional")
    monkeypatch.setattr(torch.jit, "load", lambda path: lambda x: model(x) * 1.001)
    with pytest.raises(VerificationError, match="differ by"):
        export_torchscript(model, tmp_path / "m.pt", x)
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown dimension, and a missing package, are named."""
    model, x = compacted("convolutional")
    with pytest.raises(InputError, match="'batch' and 'size', not 'time'"):
        export_program(model, tmp_path / "m.pt2", x, dynamic=("time",))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"lightning-compress\[export\]"):
        export_onnx(model, tmp_path / "m.onnx", x)
    with pytest.raises(VerificationError, match="shapes"):
        difference(nn.Linear(1, 1), nn.Linear(1, 2), [torch.ones(1, 1)])
