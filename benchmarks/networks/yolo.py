"""Every YAML of Ultralytics that builds, at its smallest scale, and what its exporter makes of the compacted model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks.network import Network, noise

__all__ = ["NETWORKS", "exported_error"]

SIZE = 64


def _files() -> list[Path]:
    """Return the YAML files of the models; none where Ultralytics is not installed."""
    spec = importlib.util.find_spec("ultralytics")
    places = [] if spec is None else spec.submodule_search_locations or []
    return sorted(file for place in places for file in (Path(place) / "cfg" / "models").rglob("*.yaml"))


def _quiet() -> None:
    os.environ |= {"YOLO_OFFLINE": "True", "YOLO_AUTOINSTALL": "False", "YOLO_VERBOSE": "False"}


def _smallest(name: str) -> str:
    """Return the name with the letter of the smallest scale, where the file has scales and the name none."""
    return re.sub(r"(?<=yolo)(v\d+|\d+)(?=[-.])", r"\1n", name, count=1) if _has_scales(name) else name


def _has_scales(name: str) -> bool:
    path = next(file for file in _files() if file.name == name)
    return "\nscales:" in path.read_text() and re.match(r"yoloe?v?-?\d+[-.]", name) is not None


def _build(name: str) -> nn.Module:
    _quiet()
    ultralytics = importlib.import_module("ultralytics")
    kind = ultralytics.RTDETR if name.startswith("rtdetr") else ultralytics.YOLO
    net: nn.Module = kind(_smallest(name), verbose=False).model
    return net.float()


def exported_error(net: nn.Module, name: str) -> float:
    """Export a compacted model to ONNX by Ultralytics' own exporter, and return the largest relative difference.

    Args:
        net: the model, in float32 and eval mode.
        name: of its YAML.
    """
    _quiet()
    ultralytics, runtime = importlib.import_module("ultralytics"), importlib.import_module("onnxruntime")
    kind = ultralytics.RTDETR if name.startswith("rtdetr") else ultralytics.YOLO
    x = noise(3, SIZE, SIZE)(1).float().sigmoid()
    with torch.no_grad():
        expected = net(x)
    first: Tensor = expected[0] if isinstance(expected, (tuple, list)) else expected
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        wrapper: Any = kind(_smallest(name), verbose=False)
        wrapper.model = net
        path = wrapper.export(format="onnx", imgsz=SIZE, verbose=False, simplify=False)
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (result, *_) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    difference = (torch.from_numpy(result).view_as(first) - first).abs().max()
    return float(difference / first.abs().max())


NETWORKS = [
    Network("ultralytics", path.name, lambda name=path.name: _build(name), noise(3, SIZE, SIZE)) for path in _files()
]
